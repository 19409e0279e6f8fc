"""`billfish verify`: collects all problems of a checkpoint instead of stopping at the first.

It checks hashes, headers and the index, then every tensor, layer by layer: shapes and dtypes of the
dialect, finite numbers, groups and zeros that the dialect can read. Finally it compares with the
model class, because a parameter that no file holds would be random. Nothing is changed.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from billfish.checkpoints import mxfp4
from billfish.checkpoints import write as files
from billfish.checkpoints.config import CONFIG, READ, read_config, read_json
from billfish.checkpoints.header import read_header
from billfish.checkpoints.kv_file import KV_FILE, read_kv
from billfish.checkpoints.match import Problem, architecture, check_generation, problems
from billfish.checkpoints.packed import PackedLinear, by_module, check_bias, measure, recognize
from billfish.checkpoints.read import INDEX, SINGLE, Checkpoint, check_counts
from billfish.checkpoints.tensors import COPIED, TENSORS, differences, read_tensors
from billfish.checkpoints.tokenizer import load_tokenizer, refuse_foreign
from billfish.checkpoints.unfinished import JOB
from billfish.errors import UserError
from billfish.formats.spec import first_nonfinite
from billfish.schemes.dialect import Dialect

COUNTED = (
    *("files", "hashes", "tensors", "bytes", "packed_linears", "dense_tensors", "parameters"),
    "source_tensors",  # that the tensor manifest traces
)
WRITERS = ("ForCausalLM", "LMHeadModel")
T = TypeVar("T")


def verify(path: Path) -> dict[str, Any]:
    """All problems of a checkpoint, with file and tensor; a UserError if there is no directory."""
    if not path.is_dir():
        raise UserError(f"{path}: no such directory. Give a local Hugging Face checkpoint.")
    survey = Survey(path)
    survey.check_manifest()
    survey.check_tensors()
    survey.check_placed()
    survey.check_kv()
    survey.check_tokenizer()
    return {"ok": not survey.problems, "checked": dict(survey.checked), "problems": survey.problems}


class Survey(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.path, self.entries = path, {}
        self.problems: list[dict[str, str | None]] = []
        self.checked: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.lost: set[str] = set()  # missing tensors that are reported already
        self.placed = self.attempt(TENSORS, lambda: read_tensors(path))
        if (path / JOB).is_dir():
            way_out = "Run the same `billfish quantize` again: it goes on where it stopped."
            self.complain(JOB, None, f"the job that writes this directory is unfinished. {way_out}")
        config = self.attempt(CONFIG, lambda: read_config(path))
        self.told, self.config = config is not None, config or {}
        shards = self.attempt(INDEX if (path / INDEX).exists() else SINGLE, self._files) or {}
        self.whole = bool(shards)  # whether every shard could be opened
        for file, names in shards.items():
            self.open_shard(file, names)
        if not self.attempt(CONFIG, self.fits):
            self.whole = False

    def fits(self) -> bool:
        check_counts(self.path / CONFIG, self.config, self.entries)
        return True

    def complain(self, file: str | None, tensor: str | None, problem: str) -> None:
        self.problems.append({"file": file, "tensor": tensor, "problem": problem})

    def about(self, name: str, problem: str) -> None:
        """Report a problem of one tensor; a missing tensor has no file."""
        self.complain(self.entries[name].file if name in self else None, name, problem)

    def attempt(self, file: str, call: Callable[[], T], more: str = "") -> T | None:
        """Result of `call`; if it raises a UserError, None and a problem of `file`."""
        try:
            return call()
        except UserError as error:
            text = str(error).removeprefix(f"{self.path / file}: ").removeprefix(f"{self.path}: ")
        self.complain(file, None, text + more)
        return None

    # -- files

    def open_shard(self, file: str, names: list[str]) -> None:
        gone = f" {len(names)} tensors are lost with it, {names[0]} the first." if names else ""
        header = self.attempt(file, lambda: read_header(self.path / file), gone)
        if header is None:
            self.whole = False
            self.lost.update(names)
            return
        self.checked["files"] += 1
        for name in sorted({*header} & {*self.entries}):
            self.complain(file, name, f"is in {self.entries[name].file}, too: which one counts?")
        self.entries.update(header)
        for name in sorted({*names} - {*header}):
            self.lost.add(name)
            self.complain(file, name, f"missing: {INDEX} says it is in this file.")
        for name in sorted({*header} - {*names}) if names else ():
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
        for file, problem in files.check_manifest(self.path):
            self.complain(file, None, problem)

    def check_placed(self) -> None:
        """Compare with the tensor manifest: whether all that the source had is there."""
        if self.placed is None or not self.whole:
            return
        self.checked["source_tensors"] = len(self.placed)
        told = {problem["tensor"] for problem in self.problems if problem["tensor"]} | self.lost
        told |= {part for name in told if name in self.placed for part in self.placed[name].names}
        for name, problem in differences(self.placed, self.entries):
            if name not in told:
                self.about(name, problem)

    # -- tensors

    def check_tensors(self) -> None:
        dialect, _, unsupported = recognize(self)
        if unsupported:
            self.complain(CONFIG, None, unsupported)
        # of the dense model; (): a problem is reported already
        shapes: dict[str, tuple[int, ...]] = {}
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
        if dialect is not None and not self.checked["packed_linears"] and self.entries:
            told = f"it says {dialect.name}, and no layer of the files is packed that way."
            self.complain(CONFIG, None, told)
        if mxfp4.is_mxfp4(self.config):
            if not self.check_mxfp4():
                return
            shapes = {name: entry.shape for name, entry in mxfp4.decoded(self.entries).items()}
        if self.whole and self.told and not self.lost and not unsupported:
            self.check_class(shapes)

    def check_mxfp4(self) -> bool:
        """Check blocks and scales; whether they can be decoded."""
        broken = mxfp4.problems(self.entries)
        for name, told in broken:
            if name not in self.lost:
                self.about(name, told)
        for name in () if broken else self:
            if mxfp4.is_scales(name):
                self.check_finite(name, mxfp4.SCALES[self.tensor(name).int()])
        return not broken

    def check_finite(self, name: str, tensor: Tensor) -> None:
        problem = first_nonfinite("", tensor)
        if problem:
            self.about(name, f"{problem.strip()}. Copy it again, or make the model again.")

    def check_layer(
        self, dialect: Dialect, module: str, names: Mapping[str, str]
    ) -> tuple[int, ...] | None:
        """(n, k) of a packed linear, () if it is damaged, None if it is not packed."""
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
        # the tensor that gives the layer's size
        source = names.get("weight_shape", names[dialect.words])
        try:
            found = measure(self, dialect, module, names)
            scheme, n, k = found.scheme, found.n, found.k
            check_bias(self, names, n)
            dtypes = [self.entries[names[part]].dtype for part in known if part in names]
            dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float16)
            specs = dialect.stored(scheme, n, k, dtype)
        except UserError as error:
            self.about(f"{module}.{error.part}" if error.part else source, str(error))
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
        if len(wrong) > 1:  # the tensor that gives the size is probably the damaged one
            self.about(source, f"says the layer is {n} x {k}; {', '.join(wrong)} do not fit that.")
        elif wrong:
            self.about(names[next(iter(wrong))], next(iter(wrong.values())))
        if len(self.problems) > before:
            return ()
        stored = {part: self.tensor(names[part]) for part in specs if part in names}
        self.check_numbers(dialect, found, stored)
        return n, k

    def check_numbers(
        self, dialect: Dialect, layer: PackedLinear, stored: dict[str, Tensor]
    ) -> None:
        before = len(self.problems)
        for part, tensor in stored.items():
            self.check_finite(layer.names[part], tensor)
            positive = "scale" in part and tensor.is_floating_point() and not dialect.zero_scales
            if positive and bool((tensor == 0).any()):
                where = (tensor == 0).nonzero()[0].tolist()
                self.about(layer.names[part], f"holds a scale of 0 at {where}: its group is lost.")
        if len(self.problems) > before:
            return
        try:
            # raises what loading would raise
            dialect.to_canonical(layer.scheme, stored, layer.n, layer.k)
        except UserError as error:
            self.about(layer.names[error.part or dialect.words], str(error))

    def check_class(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Compare with the model class: report missing parameters, other shapes, and tensors that
        the class does not have."""
        told = {problem["tensor"] for problem in self.problems}
        told |= {name for name, shape in shapes.items() if shape == () and name not in self}
        packed = {name.removesuffix("weight") + "bias" for name in shapes if name not in self}
        spare = packed | {name for name, p in (self.placed or {}).items() if p.how == COPIED}
        found = self.attempt(CONFIG, lambda: self.compare(shapes, spare))
        for name, sentence in found or ():
            if name not in told:
                self.about(name, sentence)
        self.checked["parameters"] = 0 if found is None else len(shapes) - len(found)

    def compare(self, shapes: dict[str, tuple[int, ...]], spare: set[str]) -> list[Problem]:
        named = architecture(self)
        check_generation(self.path)
        return problems(self, shapes, spare, None if self.writes else named)

    @property
    def writes(self) -> bool:
        return any(name.endswith(WRITERS) for name in self.config.get("architectures") or ())

    def check_kv(self) -> None:
        if (self.path / KV_FILE).exists():
            self.attempt(KV_FILE, lambda: read_kv(self.path / KV_FILE))

    def check_tokenizer(self) -> None:
        """A causal LM must have a tokenizer. Other models may have none; if one of its files is
        there, it must be readable."""
        names = [name for name in READ if name.startswith("tokenizer")]
        if self.told and (self.writes or any((self.path / name).exists() for name in names)):
            tokenizer = self.attempt("tokenizer.json", lambda: load_tokenizer(self.path))
            rows = self.config.get("vocab_size")
            if tokenizer is not None and isinstance(rows, int):
                self.attempt("tokenizer.json", lambda: refuse_foreign(tokenizer, rows, self.path))
