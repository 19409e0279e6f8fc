"""One block at a time: gather statistics of its linears' inputs, choose codes, and put the decoded
weights back, so that what comes after is calibrated on what the quantized model will really
compute.

Works on a StreamedModel block that is filled; changes its parameters and nothing else. Knows
nothing of files.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from billfish.models.blocks import Arguments, StreamedModel
from billfish.models.fold import fold_source
from billfish.models.passes import Anatomy, Walk, anatomy, listen
from billfish.offline.hidden import Hidden
from billfish.schemes.base import Scheme, Solved
from billfish.schemes.registry import quantizer
from billfish.solvers.methods import Method
from billfish.solvers.statistics import Statistics

OnLinear = Callable[[str, Solved], None]


@dataclass(frozen=True)
class Refining:
    """A block whose linears are solved and not yet settled: what a method's `refine` works with."""

    solved: Mapping[str, Solved]  # linears by path
    inputs: list[Tensor]  # (batch, length, hidden): what enters it behind quantized blocks
    targets: list[Tensor]  # what the original block gives behind original ones
    # The block, with these weights (by path of their linears) in place of its own: gradients flow
    # into them wherever the caller enables them.
    run: Callable[[Tensor, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class BlockJob:
    """One block, ready to be solved. `paths` are the linears to quantize; the rest keep their
    weights."""

    model: StreamedModel
    index: int
    paths: list[str]
    scheme: Scheme
    method: Method
    stored_dtype: torch.dtype  # of scales
    arguments: Arguments | None = None  # None: no calibration data (rtn)

    def solve(self, hidden: Hidden, on_linear: OnLinear) -> None:
        """Moves `hidden` behind the block and hands out each linear as it is settled."""
        if self.arguments is None:
            for path in self.paths:
                self._settle([path], self._weights([path]), None, on_linear)
        elif self.method.refine is not None:
            self._solve_and_refine(hidden, on_linear)
        else:
            self._solve(hidden, on_linear)

    def _solve(self, hidden: Hidden, on_linear: OnLinear) -> None:
        if self.method.follows_original:
            self._solve_in_order(hidden, on_linear)
        else:
            self._solve_together(hidden, on_linear)

    def _solve_and_refine(self, hidden: Hidden, on_linear: OnLinear) -> None:
        model, block, arguments = self.model, self.model.blocks[self.index], self._arguments()
        entered, solved = list(hidden.quantized), dict[str, Solved]()
        self._solve(hidden, solved.__setitem__)

        def run(state: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
            named = {f"{path}.weight": weight for path, weight in weights.items()}
            call = lambda *args, **kwargs: functional_call(block, named, args, kwargs)  # noqa: E731
            return model.run(self.index, state, arguments, call)

        refine = self.method.refine
        assert refine is not None
        found = refine(Refining(solved, entered, list(hidden.original), run))
        for path, share in {**solved, **found}.items():
            self._linear(path).weight.data = share.decoded.to(self._linear(path).weight.dtype)
            on_linear(path, share)
        for batch, state in enumerate(entered):
            hidden.quantized[batch] = model.run(self.index, state, arguments)

    # -- GPTQ: groups in the order they run, each seeing the groups before it already quantized

    def _solve_in_order(self, hidden: Hidden, on_linear: OnLinear) -> None:
        model, block = self.model, self.model.blocks[self.index]
        found = self._anatomy(hidden)
        settled = {linear.path for linear in model.linears(self.index)} - set(self.paths)
        walk, beside = (
            Walk(model, self.index, module, states, self._arguments(), found, set(settled))
            for module, states in (
                (block, hidden.quantized),
                (copy.deepcopy(block), hidden.original),
            )
        )
        groups = [[path for path in group if path in self.paths] for group in found.groups]
        seen = {path for group in groups for path in group}
        # Last come experts that no token of the first sequence reached.
        groups = [group for group in groups if group] + [[p] for p in self.paths if p not in seen]
        for paths in groups:
            statistics = self._compare(paths, walk, beside, paths is groups[-1])
            self._settle(paths, self._weights(paths), statistics, on_linear)
            walk.settle(paths)
        walk.finish()
        if not groups:
            beside.finish()

    def _compare(self, paths: list[str], walk: Walk, beside: Walk, last: bool) -> Statistics:
        """Inputs of a group in the block as it is now, next to those in the original block."""
        statistics = Statistics(self._linear(paths[0]).in_features, self.model.device)
        beside.settled.update(paths)
        for batch in range(len(walk.states)):
            x = walk.input(batch, paths[0])
            y = beside.input_and_on(batch, paths[0], to_the_end=last)
            # An expert may see other tokens in the two models; then there is nothing to compare.
            if x is not None:
                statistics.add(x, y if y is not None and y.shape == x.shape else None)
        return statistics

    def _anatomy(self, hidden: Hidden) -> Anatomy:
        return anatomy(self.model, self.index, hidden.quantized[0][:1], self._arguments())

    # -- AWQ: all statistics first, then scales folded into the layers before, then rounding

    def _solve_together(self, hidden: Hidden, on_linear: OnLinear) -> None:
        model, arguments = self.model, self._arguments()
        groups = self._anatomy(hidden).groups
        statistics = [Statistics(self._linear(g[0]).in_features, model.device) for g in groups]
        see = {g[0]: s.add for g, s in zip(groups, statistics, strict=True)}
        with listen(model.blocks[self.index], see):
            for state in hidden.quantized:
                model.run(self.index, state, arguments)
        masters = {path: self._weights([path]) for path in self.paths}
        for group, known in zip(groups, statistics, strict=True):
            if self.method.folds and all(path in self.paths for path in group):
                self._fold(group, known, masters, hidden.quantized[0][:1])
        for group, known in zip(groups, statistics, strict=True):
            for path in (path for path in group if path in self.paths):
                self._settle([path], masters.pop(path), known, on_linear)
        for path, weight in masters.items():
            self._settle([path], weight, None, on_linear)
        for batch, state in enumerate(hidden.quantized):  # in place: one list, not two
            hidden.quantized[batch] = model.run(self.index, state, arguments)

    def _fold(
        self, group: list[str], known: Statistics, masters: dict[str, Tensor], probe: Tensor
    ) -> None:
        """Scale the columns of `group` up and the layer that makes their input down, where the
        block allows it."""
        source = fold_source(self.model, self.index, group, probe, self._arguments())
        if source is None:
            return
        stacked = torch.cat([masters[path] for path in group])
        factor = quantizer(self.scheme).search_fold(
            self.scheme, stacked, known, source.row_of_column, self.stored_dtype
        )
        for path in group:
            masters[path] = masters[path] * factor
        known.rescale(1 / factor)
        rows = torch.ones(source.rows, device=factor.device)
        rows[source.row_of_column] = 1 / factor
        if source.path in masters:
            masters[source.path] = masters[source.path] * rows[:, None]
            bias = self._linear(source.path).bias
            if bias is not None:
                bias.data.mul_(rows.to(bias.dtype))
        else:
            for parameter in self.model.blocks[self.index].get_submodule(source.path).parameters():
                shape = (-1, *[1] * (parameter.ndim - 1))
                parameter.data = (parameter.data.float() * rows.view(shape)).to(parameter.dtype)

    # -- shared

    def _settle(
        self, paths: list[str], weight: Tensor, statistics: Statistics | None, on_linear: OnLinear
    ) -> None:
        """Solve linears stacked along n and give each its share."""
        solved: Solved = quantizer(self.scheme).quantize(
            self.scheme, weight, statistics, self.method.name, self.stored_dtype
        )
        start = 0
        for path in paths:
            module = self._linear(path)
            end = start + module.out_features
            share = solved.rows(start, end)
            module.weight.data = share.decoded.to(module.weight.dtype)
            on_linear(path, share)
            start = end

    def _weights(self, paths: list[str]) -> Tensor:
        """Stacked fp32 weights as the checkpoint has them, before any other cast."""
        return torch.cat([self._weight(path) for path in paths])

    def _weight(self, path: str) -> Tensor:
        model, name = self.model, f"{self.model.block_prefix(self.index)}{path}.weight"
        stored = model.checkpoint.entries[model.stored[name]].dtype
        if model.dtype in (stored, torch.float32):  # the block has it exactly, until it is settled
            return self._linear(path).weight.data.float()
        return model.read(model.stored[name], model.device).float()

    def _linear(self, path: str) -> nn.Linear:
        module = self.model.blocks[self.index].get_submodule(path)
        assert isinstance(module, nn.Linear)
        return module

    def _arguments(self) -> Arguments:
        assert self.arguments is not None
        return self.arguments
