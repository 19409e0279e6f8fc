"""A checkpoint opened in spite of its problems, which are collected: the work of `verify`.

Hashes, headers, the index, then every tensor, a layer at a time: shapes and dtypes as the dialect
stores them, numbers that are finite, groups and zeros that the dialect can read. At last the model
class: a parameter that no file holds would be random. Knows no dialect by its details; changes
nothing.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from billfish.convert import LEGACY_CONFIGS, read_quantization_config
from billfish.errors import UserError
from billfish.models import checkpoint as files
from billfish.models.compressed import METHOD
from billfish.models.dialect import Dialect
from billfish.models.foreign import read_dialect
from billfish.models.gptq import Gptq
from billfish.models.hf import INDEX, SINGLE, Checkpoint, Entry, read_config, read_header, read_json
from billfish.schemes.w4a16 import W4A16

JOB = ".billfish"  # the driver's state: there while a job is unfinished
CHUNK = 2**24  # numbers looked at together: isfinite needs several times their memory
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, ImportError, OSError, SafetensorError)
COUNTED = ("files", "hashes", "tensors", "bytes", "packed_linears", "dense_tensors", "parameters")
T = TypeVar("T")
Layer = tuple[W4A16, int, int]  # scheme, n, k


def recognize(checkpoint: Checkpoint) -> tuple[Dialect | None, str, str | None]:
    """(dialect, its name, why it cannot be read); dense ones have neither dialect nor reason."""
    legacy = any((checkpoint.path / name).is_file() for name in LEGACY_CONFIGS)
    if not legacy and not checkpoint.config.get("quantization_config"):
        return None, "dense", None
    config: dict[str, Any] = {}
    try:
        config = read_quantization_config(checkpoint)
        dialect = read_dialect(config)
    except UserError as error:
        method = config.get("quant_method") or config.get("method") or "unknown"
        return None, str(method), str(error)
    return dialect, dialect.stored_as if isinstance(dialect, Gptq) else dialect.name, None


def by_module(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Module -> the last part of each of its tensors' names -> that name."""
    modules: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = name
    return modules


def measure(
    checkpoint: Checkpoint, dialect: Dialect, module: str, names: Mapping[str, str]
) -> Layer:
    """Scheme and size of a packed linear, from headers, weight_shape and g_idx alone."""
    scheme = dialect.scheme(module)
    if scheme is None:
        raise UserError(
            f"{dialect.words} is there, and the quantization_config says this layer is not "
            "quantized. One of them belongs to another checkpoint."
        )
    stored: dict[str, Tensor] = {}
    for part, spec in dialect.stored(scheme, 0, 0, torch.float16).items():
        if part not in names:
            continue
        entry = checkpoint.entries[names[part]]
        fixed = 0 not in spec.shape  # weight_shape: the same for every layer
        if len(entry.shape) != len(spec.shape) or (fixed and entry.shape != spec.shape):
            rule = f"{spec.shape}" if fixed else f"{len(spec.shape)} dimensions"
            raise UserError(f"{part} has shape {entry.shape}, expected {rule}.")
        small = len(entry.shape) == 1
        meta = torch.empty(0 if small else entry.shape, dtype=entry.dtype, device="meta")
        stored[part] = checkpoint.tensor(names[part]) if small else meta
    scheme = dialect.settle(scheme, stored)
    return scheme, *dialect.size(scheme, stored)


class Survey(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.path, self.entries = path, {}
        self.problems: list[dict[str, str | None]] = []
        self.checked: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.lost: set[str] = set()  # told of already: nobody asks for them again
        if (path / JOB).is_dir():
            way_out = "Run the same `billfish quantize` again: it goes on where it stopped."
            self.complain(JOB, None, f"the job that writes this directory is unfinished. {way_out}")
        self.config = self.attempt("config.json", lambda: read_config(path)) or {}
        shards = self.attempt(INDEX if (path / INDEX).exists() else SINGLE, self._files) or {}
        self.whole = bool(shards)  # every shard could be opened
        for file, names in shards.items():
            self.open_shard(file, names)

    def complain(self, file: str | None, tensor: str | None, problem: str) -> None:
        self.problems.append({"file": file, "tensor": tensor, "problem": problem})

    def about(self, name: str, problem: str) -> None:
        """A complaint about one tensor; of a missing one no file is known."""
        self.complain(self.entries[name].file if name in self else None, name, problem)

    def attempt(self, file: str, call: Callable[[], T], more: str = "") -> T | None:
        """What `call` gives, or a complaint about `file`. Damaged JSON fails in many ways."""
        try:
            return call()
        except UserError as error:
            text = str(error).removeprefix(f"{self.path / file}: ").removeprefix(f"{self.path}: ")
        except DAMAGE as error:
            text = f"damaged, cannot be read ({type(error).__name__}: {error}). Copy it again."
        self.complain(file, None, text + more)
        return None

    # -- files

    def open_shard(self, file: str, names: list[str] | None) -> None:
        def read() -> dict[str, Entry]:
            header = read_header(self.path / file)
            with safe_open(self.path / file, framework="pt"):  # finds overlaps and wrong lengths
                return header

        gone = f" {len(names)} tensors are lost with it, {names[0]} the first." if names else ""
        header = self.attempt(file, read, gone)
        if header is None:
            self.whole = False
            self.lost.update(names or ())
            return
        self.checked["files"] += 1
        self.entries.update(header)
        for name in sorted({*(names or ())} - {*header}):
            self.lost.add(name)
            self.complain(file, name, f"missing: {INDEX} says it is in this file.")
        for name in sorted({*header} - {*(header if names is None else names)}):
            self.complain(file, name, f"is in this file, and {INDEX} does not say so.")

    def check_manifest(self) -> None:
        if not (self.path / files.MANIFEST).exists():
            return
        manifest = self.attempt(files.MANIFEST, lambda: read_json(self.path / files.MANIFEST))
        if manifest is None:
            return
        hashes = manifest.get("sha256")
        if not isinstance(hashes, dict) or not hashes:
            self.complain(files.MANIFEST, None, "holds no hashes to compare with. Copy it again.")
            return
        self.checked["hashes"] = len(hashes)
        for sentence in files.check_manifest(self.path):
            file, _, problem = sentence.partition(": ")
            self.complain(file, None, problem)

    # -- tensors

    def check_tensors(self) -> None:
        dialect, _, unsupported = recognize(self)
        if unsupported:
            self.complain("config.json", None, unsupported)
        shapes: dict[str, tuple[int, ...]] = {}  # as the model class has them; (): told of already
        for module, names in by_module(self).items():
            size = None if dialect is None else self.check_layer(dialect, module, names)
            if size is not None:
                self.checked["packed_linears"] += 1
                shapes[f"{module}.weight"] = size
            for part, name in names.items():
                self.checked["tensors"] += 1
                self.checked["bytes"] += self.entries[name].nbytes
                if size is None or part == "bias":
                    self.checked["dense_tensors"] += 1
                    self.check_finite(name, self.tensor(name))
                    shapes[name] = self.entries[name].shape
        if self.whole and self.config and not self.lost and not unsupported:
            self.check_class(shapes)

    def check_finite(self, name: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point():
            return
        for chunk in torch.split(tensor.flatten(), CHUNK):
            numbers = chunk.float() if chunk.dtype.itemsize == 1 else chunk  # fp8 has no isfinite
            if not bool(torch.isfinite(numbers).all()):
                problem = files.first_nonfinite("", tensor.float()) or ""
                self.about(name, f"{problem.strip()}. Copy it again, or make the model again.")
                return

    def check_layer(
        self, dialect: Dialect, module: str, names: Mapping[str, str]
    ) -> tuple[int, ...] | None:
        """(n, k) of a packed linear, () where that cannot be told, None if it is not packed."""
        before = len(self.problems)
        base = dialect.scheme(module)
        known = {} if base is None else dialect.stored(base, 0, 0, torch.float16)
        if dialect.words not in names:
            kept = sorted(known.keys() & names.keys())
            words = f"{module}.{dialect.words}"
            if kept and words not in self.lost:
                self.about(words, f"missing: {', '.join(kept)} of this layer are there without it.")
            return () if kept else None
        for part in sorted(names.keys() - known.keys() - {"bias"}) if known else ():
            self.about(names[part], f"unknown in a {dialect.name} layer with {base}.")
        if not self.lost.isdisjoint(f"{module}.{part}" for part in known):
            return ()
        source = names.get("weight_shape", names[dialect.words])  # what tells the layer's size
        try:
            scheme, n, k = measure(self, dialect, module, names)
            dtypes = [self.entries[names[part]].dtype for part in known if part in names]
            dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float16)
            specs = dialect.stored(scheme, n, k, dtype)
        except UserError as error:
            part = next((part for part in known if str(error).startswith(part)), "")
            self.about(f"{module}.{part}" if part else source, str(error))
            return ()
        wrong = {}
        for part, spec in specs.items():
            if part in names:
                entry = self.entries[names[part]]
                problem = spec.mismatch(torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
                if problem:
                    wrong[part] = f"{problem} for a {n} x {k} layer with {scheme}."
            elif part not in dialect.optional:
                self.about(f"{module}.{part}", f"missing: a {dialect.name} layer needs it.")
        if len(wrong) > 1:  # rather the one that tells the size than all the others
            self.about(source, f"says the layer is {n} x {k}; {', '.join(wrong)} do not fit that.")
        elif wrong:
            self.about(names[next(iter(wrong))], next(iter(wrong.values())))
        if len(self.problems) > before:
            return ()
        stored = {part: self.tensor(names[part]) for part in specs if part in names}
        self.check_numbers(dialect, module, stored, (scheme, n, k))
        return n, k

    def check_numbers(
        self, dialect: Dialect, module: str, stored: dict[str, Tensor], layer: Layer
    ) -> None:
        for part, tensor in stored.items():
            self.check_finite(f"{module}.{part}", tensor)
            if dialect.name == METHOD and tensor.is_floating_point() and bool((tensor == 0).any()):
                where = (tensor == 0).nonzero()[0].tolist()
                self.about(f"{module}.{part}", f"holds a scale of 0 at {where}: its group is lost.")
        try:
            dialect.to_canonical(layer[0], stored, *layer[1:])  # as loading does; nothing is kept
        except UserError as error:
            told = [part for part in stored if part.removeprefix("weight_") in str(error)]
            self.about(f"{module}.{(told or [dialect.words])[0]}", str(error))

    def check_class(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Parameters of the model class that no file holds, or that have another shape there.

        Silent where files hold names that the class does not have: transformers renames tensors of
        some families when it loads them, and those cannot be told from missing ones.
        """
        import transformers  # takes seconds; nothing else here needs it

        names = self.config.get("architectures") or []
        model_class = getattr(transformers, names[0], None) if names else None
        if model_class is None:
            return
        try:
            config = transformers.AutoConfig.from_pretrained(self.path, trust_remote_code=False)
            config.__dict__.pop("quantization_config", None)
            with torch.device("meta"):
                model = model_class._from_config(config)
        except Exception as error:  # a class may raise anything of numbers that make no sense
            problem = f"transformers cannot build {names[0]} from it: {error}"
            return self.complain("config.json", None, problem)
        prefix, left, found = f"{model.base_model_prefix}.", dict(shapes), {}
        expected = {name: tuple(value.shape) for name, value in model.named_parameters()}
        for name in expected:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            old = old.replace("LayerNorm.bias", "LayerNorm.beta")
            candidates = (name, prefix + name, name.removeprefix(prefix), old, prefix + old)
            found[name] = next((candidate for candidate in candidates if candidate in left), None)
            left.pop(found[name] or "", None)
        # Old files hold buffers, tied weights twice, and AutoGPTQ's biases of zeros.
        known = {*model.all_tied_weights_keys, *dict(model.named_buffers())}
        if any(n not in known and not n.endswith((".bias", ".inv_freq")) for n in left):
            return
        # sentence-transformers leave the pooler out, which they do not use
        excused = "|".join((*(model._keys_to_ignore_on_load_missing or ()), r"\bpooler\b"))
        for name, stored in found.items():
            self.checked["parameters"] += stored is not None
            if stored is None and name not in model.all_tied_weights_keys:
                if not re.search(excused, name):
                    self.complain(None, name, f"missing: {names[0]} has it, no file does.")
            elif stored is not None and shapes[stored] not in ((), expected[name]):
                file = "config.json" if stored not in self else self.entries[stored].file
                problem = f"has shape {shapes[stored]}, {names[0]} has {expected[name]} there."
                self.complain(file, stored, problem)
