"""Quantizes the experts of a block one after the other, so that only one is in memory.

Tokens go where the router sends them: an expert is calibrated on the tokens that reach it in the
model quantized so far, and compared with the original expert on the same tokens of the original
model, wherever that model routes them. Outputs of both models are summed up expert by expert, each
with its own routing. An expert that too few tokens reach is calibrated on all tokens of the block,
and its note says so.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from billfish.models.blocks import StreamedModel
from billfish.models.experts import Experts, routed
from billfish.models.passes import Call
from billfish.offline.streaming import return_freed_memory
from billfish.schemes.base import Scheme, Solved
from billfish.schemes.registry import quantizer
from billfish.solvers.methods import Method
from billfish.solvers.statistics import Statistics

OnLinear = Callable[[str, Solved], None]
FEW = 4  # an expert needs one token for this many inputs; else the Hessian's rank says little
EVERY = "calibrated on all tokens of the block"  # begins a note
Rows = dict[int, tuple[Tensor, Tensor]]  # expert -> its tokens, and its place in their routing


def rarely_reached(layers: Sequence[dict[str, Any]]) -> list[str]:
    """A warning about experts among the report's layers that were not calibrated on their own
    tokens."""
    found = {layer["name"].rpartition(".")[0] for layer in layers if EVERY in (layer["note"] or "")}
    if not found:
        return []
    return [
        f"{len(found)} experts were calibrated on all tokens of their block: the router sent "
        f"them too few (notes of the layers say how many): {', '.join(sorted(found)[:4])}"
        + (", ..." if len(found) > 4 else "")
        + ". More --nsamples, or text nearer to what the model will read, reach more experts."
    ]


def fewest(hidden: int) -> int:
    """Tokens below which an expert is calibrated on all tokens of the block."""
    return hidden // FEW


@dataclass
class _Weights:
    """An expert's linears, fp32: what is to be quantized, then what was."""

    gate: Tensor
    up: Tensor
    down: Tensor
    biases: list[Tensor | None]
    # Activations -> as the quantized linears take them: inputs of gate and up, of down.
    rounding: list[Callable[[Tensor], Tensor] | None]


@dataclass(frozen=True)
class ExpertsJob:
    model: StreamedModel
    block: str  # prefix of the block's parameters
    path: str  # of the Experts in the block
    paths: Sequence[str]  # linears of the block that are quantized
    scheme: Scheme
    method: Method
    stored_dtype: torch.dtype

    @property
    def experts(self) -> Experts:
        found = self.model.model.get_submodule(self.block + self.path)
        assert isinstance(found, Experts)
        return found

    def solve(
        self, calls: list[Call], originals: list[Call], on_linear: OnLinear
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs of the quantized and the original experts for each batch; `originals` is empty
        for methods that do not follow the original."""
        outputs = [torch.zeros_like(x, dtype=torch.float32) for x, _, _ in calls]
        expected = [torch.zeros_like(x, dtype=torch.float32) for x, _, _ in originals]
        count = self.experts.count
        here, there = ([_rows(call, count) for call in some] for some in (calls, originals))
        for expert in range(count):
            one = _Expert(self, expert, calls, originals, here, there, on_linear)
            one.solve(outputs, expected)
            del one
            return_freed_memory()
        return (
            [y.to(x.dtype) for y, (x, _, _) in zip(outputs, calls, strict=True)],
            [y.to(x.dtype) for y, (x, _, _) in zip(expected, originals, strict=True)],
        )


def _rows(call: Call, count: int) -> Rows:
    return {expert: (rows, places) for expert, rows, places in routed(call[1], count)}


class _Expert:
    """One expert and its tokens."""

    def __init__(
        self,
        job: ExpertsJob,
        expert: int,
        calls: list[Call],
        originals: list[Call],
        here: list[Rows],
        there: list[Rows],
        on_linear: OnLinear,
    ) -> None:
        self.job, self.number, self.calls, self.originals = job, expert, calls, originals
        self.here, self.there, self.on_linear = here, there, on_linear
        self.gating, self.leaves = job.experts.gating, job.experts.leaves
        self.dtype, self.device = job.model.dtype, job.model.device
        names = [f"{job.path}.{expert}.{leaf}" for leaf in self.leaves]
        self.names = names
        read = [
            job.model.read(job.model.stored[f"{job.block}{n}.weight"], self.device) for n in names
        ]
        biases = [self._bias(name) for name in names]
        gate, up, down = (weight.float() for weight in read)
        self.weights = _Weights(gate, up, down, biases, [None, None])
        tokens = sum(len(rows[expert][0]) for rows in here if expert in rows)
        every, least = sum(len(x) for x, _, _ in calls), fewest(gate.shape[1])
        self.all, self.note = tokens < least, None
        if self.all:
            self.note = (
                f"{EVERY} ({every}): {tokens} were routed to this expert, fewer than {least}"
            )

    def _bias(self, name: str) -> Tensor | None:
        stored = self.job.model.stored.get(f"{self.job.block}{name}.bias")
        return None if stored is None else self.job.model.read(stored, self.device).to(self.dtype)

    def solve(self, outputs: list[Tensor], expected: list[Tensor]) -> None:
        placed = self._fold()
        before = replace(self.weights)
        known = Statistics(before.gate.shape[1], self.device)
        for batch in range(len(self.calls)):
            known.add(*self._inputs(batch))
        self._quantize(("gate", "up"), 0, known)
        kept: list[Tensor | None] = []  # inputs of down, of tokens that are routed here
        known = Statistics(before.down.shape[1], self.device, placed=placed)
        for batch in range(len(self.calls)):
            x, y = self._inputs(batch)
            middle = self._middle(self.weights, x)
            known.add(middle, None if y is None else self._middle(before, y))
            own = self.here[batch].get(self.number)
            kept.append(None if own is None else middle[own[0]] if self.all else middle)
        self._quantize(("down",), 1, known)
        for batch, inputs in enumerate(kept):
            if inputs is not None:
                self._add(outputs[batch], self.calls[batch], self.here[batch], inputs, self.weights)
        for batch, rows in enumerate(self.there):
            if self.number in rows:
                inputs = self._middle(before, self.originals[batch][0][rows[self.number][0]])
                self._add(expected[batch], self.originals[batch], rows, inputs, before)

    def _inputs(self, batch: int) -> tuple[Tensor, Tensor | None]:
        """Its tokens in the quantized model, and the same tokens in the original."""
        x = self.calls[batch][0]
        y = self.originals[batch][0] if self.originals else None
        if self.all:
            return x, y
        rows = self.here[batch][self.number][0] if self.number in self.here[batch] else slice(0)
        return x[rows], None if y is None else y[rows]

    def _middle(self, weights: _Weights, x: Tensor) -> Tensor:
        """Input of down."""
        turn = weights.rounding[0]
        x = x if turn is None else turn(x)
        gate, up = (
            linear(x, weight.to(self.dtype), bias)
            for weight, bias in zip((weights.gate, weights.up), weights.biases, strict=False)
        )
        return self.gating(gate, up)  # type: ignore[no-any-return]

    def _add(self, out: Tensor, call: Call, rows: Rows, middle: Tensor, weights: _Weights) -> None:
        tokens, places = rows[self.number]
        turn = weights.rounding[1]
        middle = middle if turn is None else turn(middle)
        y = linear(middle, weights.down.to(self.dtype), weights.biases[2])
        out.index_add_(0, tokens, (y * call[2][tokens, places, None]).float())

    # -- codes

    def _quantize(self, parts: tuple[str, ...], place: int, known: Statistics) -> None:
        """Quantize linears that share an input, unless the scheme does not take them."""
        job = self.job
        names = [self.names[("gate", "up", "down").index(part)] for part in parts]
        if names[0] not in job.paths:
            return
        weight = torch.cat([getattr(self.weights, part) for part in parts])
        solved: Solved = quantizer(job.scheme).quantize(
            job.scheme, weight, known, job.method.name, job.stored_dtype
        )
        rounding = [*self.weights.rounding]
        rounding[place] = solved.rounding
        self.weights = replace(self.weights, rounding=rounding)
        size = len(weight) // len(parts)
        for i, (part, name) in enumerate(zip(parts, names, strict=True)):
            found = solved.rows(i * size, (i + 1) * size)
            setattr(self.weights, part, found.decoded)
            said = "; ".join(note for note in (found.note, self.note) if note) or None
            self.on_linear(name, replace(found, note=said))

    # -- folding: factors of down's inputs go into up, whose outputs they are

    def _fold(self) -> bool:
        """AWQ's scales, or the factors and the order of channels that a scheme wants; returns
        whether channels were put in order."""
        job, weights, solver = self.job, self.weights, quantizer(self.job.scheme)
        choose = getattr(solver, "channel_factors", None)
        taken = all(name in job.paths for name in self.names) and weights.biases == [None] * 3
        if not (job.method.folds or choose) or not taken or not self.gating.is_linear_in_up():
            return False
        share = torch.arange(weights.down.shape[1], device=self.device)
        if job.method.folds:
            known = Statistics(len(share), self.device)
            for middle in self._middles():
                known.add(middle)
            stored = job.stored_dtype
            self._scale(solver.search_fold(job.scheme, weights.down, known, share, stored))
            return False
        squares = torch.zeros(len(share), device=self.device)
        for middle in self._middles():
            squares += middle.float().square().sum(0)
        factor = choose(job.scheme, squares, share) if choose else None
        if factor is not None:
            self._scale(factor)
            squares /= factor.square()
        order = getattr(solver, "channel_order", lambda scheme, squares: None)(job.scheme, squares)
        if order is None:
            return False
        weights.gate, weights.up = weights.gate[order], weights.up[order]
        weights.down = weights.down[:, order]
        return True

    def _middles(self) -> Iterator[Tensor]:
        for batch in range(len(self.calls)):
            yield self._middle(self.weights, self._inputs(batch)[0])

    def _scale(self, factor: Tensor) -> None:
        self.weights.up = self.weights.up / factor[:, None]
        self.weights.down = self.weights.down * factor
