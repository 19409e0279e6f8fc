"""What a checkpoint format must say so that the rest of the house can read and write it.

A dialect is another way to store the same numbers: its own names, words and quantization_config
for the canonical tensors of a scheme. Integers, scales and zeros come through unchanged in both
directions. It knows no files, and no modules beyond their names. Those of one scheme are in its
folder; the one for all schemes, our own, is checkpoints/own.py.
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
    """For schemes of one family, or of all; `scheme` is one of these wherever it is an argument."""

    name: ClassVar[str]
    known_as: ClassVar[str]  # in lists of what can be read
    words: ClassVar[str]  # the tensor of the codes: a module that has it in a file is packed
    kinds: ClassVar[Mapping[str, str]]  # its tensors -> packed, scales or zeros, for `inspect`
    optional: ClassVar[frozenset[str]]  # tensors of stored() that a file may lack
    writable: ClassVar[bool]  # `convert --to` it
    zero_scales: ClassVar[bool]  # files with scales of 0 are whole: their writers left them
    legacy_config: ClassVar[str | None]  # a second file that holds its config

    @staticmethod
    def claims(config: Config) -> bool:
        """Whether a quantization_config is written in it."""

    @classmethod
    def read(cls, config: Config) -> "Dialect":
        """Raises a UserError that names what cannot be read."""

    @property
    def label(self) -> str:
        """Its name with its version, where there are several."""

    def scheme(self, module: str) -> Any:
        """How the config says this linear is stored; None: not quantized."""

    def stored(self, scheme: Any, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """The tensors of one (n, k) linear in the file, scales in `dtype`."""

    def size(self, scheme: Any, stored: Tensors) -> tuple[int, int]:
        """(n, k) of a stored linear. The words may be on the meta device."""

    def resolve_scheme(self, scheme: Any, stored: Tensors) -> Any:
        """The scheme this layer really has, where the config leaves it open. Words may be meta."""

    def to_canonical(self, scheme: Any, stored: Tensors, n: int, k: int) -> dict[str, Tensor]:
        """Canonical tensors of a resolved scheme; a UserError where `stored` does not fit it."""

    def from_canonical(self, scheme: Any, tensors: Tensors) -> dict[str, Tensor]:
        """The inverse; raises a UserError where the dialect cannot say it."""

    @staticmethod
    def refuses(module: str, scheme: Any, n: int, k: int) -> str | None:
        """Why this dialect cannot store such a layer, in a sentence a user can act on."""

    @staticmethod
    def config(schemes: Mapping[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
        """Its quantization_config for these modules; `ignore` are the linears left as they are."""

    @staticmethod
    def config_of_all(scheme: Any, ignore: Sequence[str]) -> dict[str, Any]:
        """The same where every linear has one scheme, but those in `ignore`."""

    @staticmethod
    def notes(schemes: Iterable[Any]) -> list[str]:
        """What a user should know of a model that is written in it, in sentences."""


class Plain:
    """What most dialects have in common."""

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
    """A config's quant_method; of a legacy quantize_config.json, which does not name it, a guess
    from what it says."""
    method = config.get("quant_method") or config.get("method")
    if method:
        return str(method)
    if "w_bit" in config or "zero_point" in config:
        return "awq"
    return "gptq" if "bits" in config and "group_size" in config else None


def check_stored(dialect: Dialect, scheme: Any, stored: Tensors, n: int, k: int) -> None:
    """Raises where a tensor is missing, is not what `dialect.stored` says, or is not finite."""
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
    """Raises for a tensor of a packed layer that nobody reads: it may change what is computed."""
    known = {*dialect.stored(scheme, 0, 0, torch.float16), "bias"}
    unknown = sorted(set(found) - known)
    if unknown:
        raise UserError(
            f"{', '.join(unknown)} is unknown in a {dialect.name} layer with {scheme}; without "
            "it the result could be wrong. The quantization_config does not fit the file."
        )


def common_scheme(schemes: Mapping[str, S]) -> S:
    """The scheme of most modules: what a config says once, the others being exceptions."""
    if not schemes:
        raise UserError("there is no quantized linear to write a quantization_config for.")
    return Counter(schemes.values()).most_common(1)[0][0]


def pattern(expression: str) -> Callable[[str], bool]:
    """A config's regular expression, matched from the start of the name as every writer does."""
    try:
        compiled = re.compile(expression)
    except re.error as error:
        raise UserError(
            f"quantization_config: {expression!r} is no regular expression ({error})."
        ) from None
    return lambda name: compiled.match(name) is not None


def integer(config: Config, *names: str) -> int:
    """The first of `names` that the config has, which must be an integer."""
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
    """A part of the config that is an object of its own; absent and null are empty."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise UserError(f"quantization_config: {name} is {value!r}, expected an object.")
    return value


def names(config: Config, name: str) -> list[str]:
    """A list of strings, nested or not; absent and null are empty."""
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
