"""`bench kernels`: the linears of named models in one scheme, against cuBLAS and the roofline.

    floor = max(bytes / memory peak, 2 m n k / compute peak)      bytes = weights, scales, x and y

Peaks are in peaks.py. Weights and x are random: zeros draw less power, so that clocks rise. Results
are plain dicts, ready for JSON.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from billfish.bench.peaks import peaks_of
from billfish.bench.shapes import LinearShape, ShapeSet
from billfish.bench.timing import MODES, Card, Rules
from billfish.errors import UserError
from billfish.schemes import DEFAULT, SCHEMES
from billfish.schemes.base import LinearOp, Scheme
from billfish.schemes.registry import choose_op, ops_of, with_options
from billfish.version import __version__

Result = dict[str, Any]
RESULT_VERSION = 1
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def refuse_unknown(what: str, given: Sequence[str], known: Collection[str]) -> None:
    wrong = [name for name in given if name not in known]
    if wrong or not given:
        named = ", ".join(map(repr, wrong)) or "none given"
        raise UserError(f"{what} {named}: known are {', '.join(known)}.")


@dataclass(frozen=True)
class KernelRequest:
    sets: tuple[ShapeSet, ...]
    rows: tuple[int, ...]  # batch sizes m
    scheme: str = DEFAULT
    group_sizes: tuple[int, ...] = (128,)
    symmetric: bool = True
    dtypes: tuple[str, ...] = ("float16",)
    op: str = "auto"
    modes: tuple[str, ...] = MODES

    def __post_init__(self) -> None:
        refuse_unknown("scheme", (self.scheme,), SCHEMES)
        refuse_unknown("dtype", self.dtypes, DTYPES)
        refuse_unknown("mode", self.modes, MODES)
        for group_size in self.group_sizes:
            for linear in (linear for made in self.sets for linear in made.linears):
                # Raises if the group size does not divide k, before anything is measured.
                self.make_scheme(group_size).tensors(linear.n, linear.k, torch.float16)

    def make_scheme(self, group_size: int) -> Scheme:
        return with_options(self.scheme, group_size=group_size, symmetric=self.symmetric)

    def doubled(self, device: torch.device) -> bool:
        """Whether the op's tensor cores have twice the peak of dense 16-bit products."""
        made, linear = self.make_scheme(self.group_sizes[0]), self.sets[0].linears[0]
        return choose_op(made, linear.n, linear.k, device, self.op).doubled

    def refuse(self, device: torch.device) -> None:
        """Raises if an op cannot run on `device`, before anything is measured."""
        for group_size in self.group_sizes:
            scheme = self.make_scheme(group_size)
            if device.type == "cuda" and self.op == ops_of(scheme)[-1].name:
                raise UserError(f"op {self.op!r} is the oracle: it is not for measuring.")
            for linear in (linear for made in self.sets for linear in made.linears):
                choose_op(scheme, linear.n, linear.k, device, self.op)


@dataclass(frozen=True)
class KernelVariant:
    """What all points of one curve share."""

    dtype: str
    group_size: int
    symmetric: bool

    def __str__(self) -> str:
        return f"{self.dtype}, group {self.group_size}, {'sym' if self.symmetric else 'asym'}"


Key = tuple[int, int, int, KernelVariant]  # k, n, m


class KernelBench:
    """One request on one card. `keep` is given the result so far after each linear."""

    def __init__(
        self,
        request: KernelRequest,
        card: Card,
        rules: Rules,
        say: Callable[[str], None] = lambda message: None,
        keep: Callable[[Result], None] = lambda result: None,
    ) -> None:
        self.request, self.card, self.rules, self.say, self.keep = request, card, rules, say, keep
        self.device = card.device
        self.generator = torch.Generator(self.device).manual_seed(0)
        self.headline = "pdl" if "pdl" in request.modes else request.modes[0]
        self.points: dict[Key, Result] = {}
        self.dense: dict[tuple[int, int, int, str], Result] = {}
        self.chains: list[Result] = []

    def measure(self) -> Result:
        self.request.refuse(self.device)
        self.say("what the card can do")
        facts, ceilings = self.card.facts(), self.card.ceilings()
        self.dense_peaks = self.peaks = peaks_of(facts["name"], ceilings)
        if self.request.doubled(self.device):
            self.peaks = self.peaks.doubled()
        self.result = {
            "result_version": RESULT_VERSION,
            "complete": False,
            **circumstances(facts),
            "before": self.card.readings(),
            "after": None,
            "ceilings": ceilings,
            "peaks": asdict(self.peaks),
            "protocol": {
                **asdict(self.rules),
                "what": "CUDA graph of launches over rotating weight copies, replayed; us a launch",
                "headline_mode": self.headline,
            },
            "scheme": self.request.scheme,
            "sets": {made.name: _sizes(made) for made in self.request.sets},
            "points": [],
            "chains": self.chains,
        }
        for made in self.request.sets:
            for dtype in self.request.dtypes:
                for linear in made.linears:
                    self._dense(made, linear, dtype)
                for group_size in self.request.group_sizes:
                    self._set(made, KernelVariant(dtype, group_size, self.request.symmetric))
        self.result.update(complete=True, after=self.card.readings())
        self._keep()
        return self.result

    def _keep(self) -> None:
        self.result["points"] = list(self.points.values())
        self.keep(self.result)

    # -- cuBLAS

    def _dense(self, made: ShapeSet, linear: LinearShape, dtype: str) -> None:
        k, n = linear.k, linear.n
        rows = [m for m in self.request.rows if (k, n, m, dtype) not in self.dense]
        nbytes = k * n * DTYPES[dtype].itemsize
        copies = self.rules.copies(nbytes, self.rules.least_dense_copies)
        weights: list[Tensor] = []
        for m in rows:
            self.say(f"{made.label(linear)} {k} x {n}, m = {m}, {dtype}: cuBLAS")
            moved, flop = nbytes + self._traffic(k, n, m, dtype), 2 * m * n * k
            floor = self.dense_peaks.floor_us(moved, flop)
            found: Result = {"floor_us": floor, "copies": copies, "us": None, "error": None}
            self.dense[k, n, m, dtype] = found
            try:
                while len(weights) < copies:
                    weights.append(self._randn(n, k, dtype))
                x = self._randn(m, k, dtype)
                calls = [partial(torch.matmul, x, weight.T) for weight in weights]
                timing = self.card.time(calls, self.rules.launches(copies, floor), "pdl")
                found["us"] = asdict(timing)
            except torch.OutOfMemoryError:
                found["error"] = f"out of memory with {copies} copies of {nbytes} bytes"

    # -- the scheme

    def _set(self, made: ShapeSet, variant: KernelVariant) -> None:
        ops: dict[tuple[int, int], list[LinearOp]] = {}
        twins = [  # chains of a model whose layer has the same shapes
            told
            for told in self.chains
            if told["linears"] == _sizes(made) and told["variant"] == asdict(variant)
        ]
        for told in twins:
            told["sets"].append(made.name)
        chain = made.is_layer and not twins
        for linear in made.linears:
            keys = [(linear.k, linear.n, m, variant) for m in self.request.rows]
            for key in keys:
                if key in self.points and made.label(linear) not in self.points[key]["linears"]:
                    self.points[key]["linears"].append(made.label(linear))
            wanted = [key for key in keys if key not in self.points]
            if not wanted and not chain:
                continue
            failed = None
            try:
                ops[linear.k, linear.n] = self._ops(linear, variant)
            except torch.OutOfMemoryError:
                failed = "out of memory for the copies of the weights"
            except UserError as error:
                failed = str(error)
            for key in wanted:
                self.say(f"{made.label(linear)} {linear.k} x {linear.n}, m = {key[2]}, {variant}")
                copies = ops.get((linear.k, linear.n))
                self.points[key] = self._point(made.label(linear), key, copies, failed)
            self._keep()
        if chain and len(ops) == len(set(_pairs(made))):
            for m in self.request.rows:
                self.say(f"{made.name} layer in one graph, m = {m}, {variant}")
                self._chain(made, m, variant, ops)
            self._keep()

    def _ops(self, linear: LinearShape, variant: KernelVariant) -> list[LinearOp]:
        scheme, k, n = self.request.make_scheme(variant.group_size), linear.k, linear.n
        make = choose_op(scheme, n, k, self.device, self.request.op)
        ops: list[LinearOp] = []
        while not ops or len(ops) < self.rules.copies(ops[0].nbytes(), self.rules.least_copies):
            tensors = scheme.random_tensors(n, k, DTYPES[variant.dtype], self.generator)
            ops.append(make(scheme, tensors))
        return ops

    def _point(
        self, label: str, key: Key, ops: Sequence[LinearOp] | None, failed: str | None
    ) -> Result:
        k, n, m, variant = key
        dense = self.dense[k, n, m, variant.dtype]
        point: Result = {
            "linears": [label],
            "k": k,
            "n": n,
            "m": m,
            **asdict(variant),
            "op": ops[0].name if ops else None,
            "us": {},
            "error": failed,
            "cublas_us": dense["us"],
            "cublas_floor_us": dense["floor_us"],
            "cublas_copies": dense["copies"],
            "cublas_error": dense["error"],
        }
        if not ops:
            return point
        weights = ops[0].nbytes()
        nbytes, flop = weights + self._traffic(k, n, m, variant.dtype), 2 * m * n * k
        floor = self.peaks.floor_us(nbytes, flop)
        launches = self.rules.launches(len(ops), floor)
        point |= {
            "bytes": nbytes,
            "flop": flop,
            "bits_per_weight": weights * 8 / (n * k),  # includes padding
            "floor_us": floor,
            "copies": len(ops),
            "launches": launches,
        }
        try:
            x = self._randn(m, k, variant.dtype)
            for mode in self.request.modes:
                timing = self.card.time([partial(op, x) for op in ops], launches, mode)
                point["us"][mode] = asdict(timing)
        except torch.OutOfMemoryError:
            return point | {"error": f"out of memory at m = {m}"}
        except UserError as error:  # such as a kernel that does not compile for this GPU
            return point | {"error": str(error)}
        return point | figures(point, self.headline)

    def _chain(
        self,
        made: ShapeSet,
        m: int,
        variant: KernelVariant,
        ops: dict[tuple[int, int], list[LinearOp]],
    ) -> None:
        """All linears of a layer in one graph, against the sum of their separate times."""
        parts = [self.points[k, n, m, variant] for k, n in _pairs(made)]
        told: Result = {
            "sets": [made.name],
            "m": m,
            "variant": asdict(variant),
            "linears": _sizes(made),
            "us": {},
            "parts_us": {},
            "cublas_parts_us": None,
            "error": None,
        }
        self.chains.append(told)
        bad = next((part["error"] for part in parts if part["error"]), None)
        if bad:
            told["error"] = bad
            return
        if all(part["cublas_us"] for part in parts):
            told["cublas_parts_us"] = sum(part["cublas_us"]["median"] for part in parts)
        told["floor_us"] = sum(part["floor_us"] for part in parts)
        layer = sum(ops[pair][0].nbytes() for pair in _pairs(made))
        layers = self.rules.copies(layer, 1)
        try:
            xs = {k: self._randn(m, k, variant.dtype) for k, _ in _pairs(made)}
            calls = [
                partial(ops[pair][index % len(ops[pair])], xs[pair[0]])
                for index in range(layers)
                for pair in _pairs(made)
            ]
            launches = self.rules.launches(len(calls), told["floor_us"] / len(parts))
            for mode in self.request.modes:
                timing = self.card.time(calls, launches, mode)
                told["us"][mode] = asdict(timing.times(len(parts)))
                told["parts_us"][mode] = sum(part["us"][mode]["median"] for part in parts)
        except torch.OutOfMemoryError:
            told["error"] = f"out of memory at m = {m}"

    # -- numbers

    def _traffic(self, k: int, n: int, m: int, dtype: str) -> int:  # bytes of x and y
        return (m * k + m * n) * DTYPES[dtype].itemsize

    def _randn(self, rows: int, columns: int, dtype: str) -> Tensor:
        made = torch.empty(rows, columns, dtype=DTYPES[dtype], device=self.device)
        return made.normal_(generator=self.generator)


def figures(point: Result, mode: str) -> Result:
    """Figures derived from the times of one point."""
    median, cublas = point["us"][mode]["median"], point["cublas_us"]
    return {
        "intensity": point["flop"] / point["bytes"],
        "tbps": point["bytes"] / median / 1e6,
        "tflops": point["flop"] / median / 1e6,
        "roofline": point["floor_us"] / median,
        "speedup": cublas["median"] / median if cublas else None,
        "ideal_speedup": point["cublas_floor_us"] / point["floor_us"],
    }


def circumstances(card: Result) -> Result:
    """What every result records about its run."""
    return {
        "command": shlex.join(["billfish", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "billfish": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "card": card,
    }


def commit() -> str | None:
    """Of the checkout the package lies in, "-dirty" if changed; None where it is installed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # only looks
    try:
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, check=True, env=quiet
        )
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip() or None


def _pairs(made: ShapeSet) -> list[tuple[int, int]]:
    return [(linear.k, linear.n) for linear in made.linears]


def _sizes(made: ShapeSet) -> list[str]:
    return [f"{k}x{n}" for k, n in _pairs(made)]
