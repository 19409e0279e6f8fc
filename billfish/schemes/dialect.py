"""The interface of checkpoint formats ("dialects") for quantized weights.

A dialect stores the numbers of a scheme's canonical tensors under other names and in other words,
with a quantization_config of its own. Conversion in both directions keeps integers, scales and
zeros unchanged. A dialect reads no files and knows modules by name only. Dialects of one scheme are
in its folder; Billfish's own, for all schemes, is checkpoints/own.py.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.formats.spec import TensorSpec, first_nonfinite
from billfish.schemes.base import Tensors

Config = Mapping[str, Any]
S = TypeVar("S")
SCALES = (torch.float16, torch.bfloat16, torch.float32)


class Dialect(Protocol):
    """A format for the schemes of one family or of all; `scheme` arguments are such schemes."""

    name: ClassVar[str]
    known_as: ClassVar[str]  # its name in error messages
    words: ClassVar[str]  # the tensor of codes: a module that has it is packed
    kinds: ClassVar[Mapping[str, str]]  # tensor -> packed, scales or zeros, for `inspect`
    optional: ClassVar[frozenset[str]]  # tensors of stored() that a file may lack
    writable: ClassVar[bool]  # whether `convert --to` can write it
    zero_scales: ClassVar[bool]  # its writers may leave scales of 0, so `verify` accepts them
    legacy_config: ClassVar[str | None]  # name of a second file with its config

    @staticmethod
    def claims(config: Config) -> bool:
        """Whether a quantization_config belongs to this dialect."""

    @classmethod
    def read(cls, config: Config) -> "Dialect":
        """The dialect with the settings of a config; raises a UserError for unsupported ones."""

    @property
    def label(self) -> str:
        """Its name, with a version if there are several."""

    def scheme(self, module: str) -> Any:
        """The scheme of this linear according to the config; None: not quantized."""

    def stored(self, scheme: Any, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """The tensors of an (n, k) linear in the file, with scales in `dtype`."""

    def size(self, scheme: Any, stored: Tensors) -> tuple[int, int]:
        """(n, k) of a stored linear. Its large tensors may be on the meta device."""

    def resolve_scheme(self, scheme: Any, stored: Tensors) -> Any:
        """The scheme of this layer, if its tensors decide what the config leaves open. Large
        tensors may be on the meta device."""

    def to_canonical(self, scheme: Any, stored: Tensors, n: int, k: int) -> dict[str, Tensor]:
        """The canonical tensors; raises a UserError if `stored` does not fit the resolved
        scheme."""

    def from_canonical(self, scheme: Any, tensors: Tensors) -> dict[str, Tensor]:
        """The inverse; raises a UserError if the dialect cannot store the layer."""

    @staticmethod
    def refuses(module: str, scheme: Any, n: int, k: int) -> str | None:
        """Why this dialect cannot store such a layer, as advice to the user; or None."""

    @staticmethod
    def config(schemes: Mapping[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
        """The quantization_config for these modules; `ignore` are the dense linears."""

    @staticmethod
    def config_of_all(scheme: Any, ignore: Sequence[str]) -> dict[str, Any]:
        """The same if all linears except those in `ignore` have one scheme."""

    @staticmethod
    def notes(schemes: Iterable[Any]) -> list[str]:
        """Sentences that a user should read when a model is written in this dialect."""


class Plain:
    """Defaults for dialects."""

    name: ClassVar[str]
    optional: ClassVar[frozenset[str]] = frozenset()
    writable: ClassVar[bool] = True
    zero_scales: ClassVar[bool] = True
    legacy_config: ClassVar[str | None] = None

    @property
    def label(self) -> str:
        return self.name

    def resolve_scheme(self, scheme: Any, stored: Tensors) -> Any:
        return scheme

    @staticmethod
    def refuses(module: str, scheme: Any, n: int, k: int) -> str | None:
        return None

    @staticmethod
    def notes(schemes: Iterable[Any]) -> list[str]:
        return []


def method_of(config: Config) -> str | None:
    """A config's quant_method. A legacy quantize_config.json does not name it; then it is guessed
    from the keys."""
    named = config.get("quant_method")
    if named is not None and not isinstance(named, str):  # transformers would ignore the config
        raise UserError(f"quantization_config: quant_method is {named!r}, expected a name.")
    method = named or config.get("method")
    if method:
        return str(method)
    if "w_bit" in config or "zero_point" in config:
        return "awq"
    return "gptq" if "bits" in config and "group_size" in config else None


def check_stored(dialect: Dialect, scheme: Any, stored: Tensors, n: int, k: int) -> None:
    """Raise if a tensor is missing, differs from `dialect.stored`, or is not finite."""
    if n < 1 or k < 1:
        raise UserError(f"its size is {n} x {k}. The tensor that says so is damaged.")
    dtype = next((t.dtype for t in stored.values() if t.is_floating_point()), torch.float16)
    if dtype not in SCALES:
        raise UserError(f"its scales have dtype {dtype}; expected 16 or 32 bits.")
    for name, spec in dialect.stored(scheme, n, k, dtype).items():
        if name not in stored:
            if name in dialect.optional:
                continue
            raise UserError(
                f"{name} is missing, without which a {dialect.name} layer cannot be read. "
                "The checkpoint is incomplete: copy it again.",
                part=name,
            )
        problem = spec.mismatch(stored[name])
        if problem:
            raise UserError(
                f"{name} {problem} for a {n} x {k} layer stored as {dialect.name} with {scheme}. "
                "The file and its config.json do not belong together.",
                part=name,
            )
        if not stored[name].is_meta:
            nonfinite = first_nonfinite(name, stored[name])
            if nonfinite:
                raise UserError(
                    f"{nonfinite}; such a layer cannot be used. Make the model again.", part=name
                )


def refuse_unknown(dialect: Dialect, scheme: Any, found: Iterable[str]) -> None:
    """Raise if a packed layer has a tensor that is not read: it might change the result."""
    known = {*dialect.stored(scheme, 0, 0, torch.float16), "bias"}
    unknown = sorted(set(found) - known)
    if unknown:
        raise UserError(
            f"{', '.join(unknown)} is unknown in a {dialect.name} layer with {scheme}; without "
            "it the result could be wrong. The quantization_config does not fit the file."
        )


def common_scheme(schemes: Mapping[str, S]) -> S:
    """The most frequent scheme: a config states it once and lists the others as exceptions."""
    if not schemes:
        raise UserError("there is no quantized linear to write a quantization_config for.")
    return Counter(schemes.values()).most_common(1)[0][0]


def pattern(expression: str) -> Callable[[str], bool]:
    """A predicate for a config's regular expression, which matches at the start of a name."""
    try:
        compiled = re.compile(expression)
    except re.error as error:
        raise UserError(
            f"quantization_config: {expression!r} is no regular expression ({error})."
        ) from None
    return lambda name: compiled.match(name) is not None


def integer(config: Config, *names: str) -> int:
    """The first of `names` that the config has; raises unless it is an integer."""
    for name in names:
        if config.get(name) is not None:
            value = config[name]
            if isinstance(value, bool) or not isinstance(value, int):
                raise UserError(f"quantization_config: {name} = {value!r} is not an integer.")
            return value
    raise UserError(f"quantization_config: {names[0]} is missing.")


def flag(config: Config, name: str, default: bool) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UserError(f"quantization_config: {name} = {value!r} is not true or false.")
    return value


def section(config: Config, name: str) -> Config:
    """An object in the config; empty if absent or null."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise UserError(f"quantization_config: {name} is {value!r}, expected an object.")
    return value


def names(config: Config, name: str) -> list[str]:
    """A possibly nested list of strings, flattened; empty if absent or null."""
    return list(_flatten(config.get(name) or [], name))


def _flatten(value: Any, name: str) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _flatten(item, name)
    else:
        raise UserError(f"quantization_config: {name} holds {value!r}, expected names.")


def is_lm_head(module: str) -> bool:
    return module.rpartition(".")[2] == "lm_head"
