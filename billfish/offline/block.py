"""Quantizes one block: collects statistics of its linears' inputs, chooses codes, and puts the
decoded weights back into the block, so that the layers after it are calibrated on the activations
that the quantized model will compute.

The block belongs to a StreamedModel and must be filled. Only its parameters change; no file is
read or written, except that weights are read again where the block holds them rounded.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from billfish.models.blocks import Arguments, StreamedModel
from billfish.models.experts import Experts, idle_experts
from billfish.models.fold import FoldSource, find_reordering, fold_source
from billfish.models.passes import (
    BlockRunner,
    BlockStructure,
    observe_inputs,
    probe_structure,
    rounded_input,
)
from billfish.offline.activations import Activations
from billfish.offline.experts import ExpertsJob
from billfish.offline.streaming import return_freed_memory
from billfish.schemes.base import Scheme, Solved
from billfish.schemes.registry import quantizer
from billfish.solvers.methods import Method
from billfish.solvers.refining import Gain, Refined, Refining
from billfish.solvers.statistics import Statistics

OnLinear = Callable[[str, Solved], None]
SEEN = 2**14  # tokens, at least, that decide about channel factors


@dataclass(frozen=True)
class BlockJob:
    """How to quantize one block. `paths` are the linears to quantize; the others keep their
    weights."""

    model: StreamedModel
    index: int
    paths: list[str]
    scheme: Scheme
    method: Method
    stored_dtype: torch.dtype  # dtype of stored scales
    arguments: Arguments | None = None  # of the block's forward; None: no calibration data (rtn)
    steps: int = 0  # of training, for methods with `refine`; as are the next two
    seed: int = 0
    on_step: Callable[[int], None] = lambda done: None
    # Path of a linear -> what was folded into its weight.
    folded: dict[str, list[Callable[[Tensor], Tensor]]] = field(default_factory=dict)
    # Linears whose input channels were put into the order that the scheme wants.
    placed: set[str] = field(default_factory=set)
    # Linears that are quantized round their inputs, if the scheme does, until the block is solved.
    rounding: ExitStack = field(default_factory=ExitStack)

    def solve(self, activations: Activations, on_linear: OnLinear) -> Gain | None:
        """Calls `on_linear` for each quantized linear; replaces `activations`, the block's inputs,
        by its outputs. Returns what training gained, if the method trains."""
        with self.rounding:
            return self._solve(activations, on_linear)

    def _solve(self, activations: Activations, on_linear: OnLinear) -> Gain | None:
        if self.arguments is None:
            for path in self.paths:
                self._quantize([path], self._weights([path]), None, on_linear)
                return_freed_memory()
        elif self.method.refine is not None and self.paths:
            return self._solve_and_refine(activations, on_linear, self.method.refine)
        elif self.method.follows_original:
            self._solve_in_order(activations, on_linear).finish()
        else:
            self._solve_together(activations, on_linear)
        return None

    def _solve_and_refine(
        self,
        activations: Activations,
        on_linear: OnLinear,
        refine: Callable[[Refining], Refined],
    ) -> Gain | None:
        model, block, arguments = self.model, self.model.blocks[self.index], self._arguments()
        solved: dict[str, Solved] = {}
        self._solve_in_order(activations, solved.__setitem__)
        # Training takes 17 bytes a weight on a GPU, 21 in fp32 (counted): the rest is freed.
        untrained = {path: replace(found, target=None) for path, found in solved.items()}
        for path in solved:
            self._put(path, self._linear(path).weight.to("meta"))

        def run(state: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
            named = {f"{path}.weight": weight for path, weight in weights.items()}
            call = lambda *args, **kwargs: functional_call(block, named, args, kwargs)  # noqa: E731
            return model.run(self.index, state, arguments, call)

        inputs, targets = activations.quantized, activations.original
        seed = self.seed + self.index
        routes = bool(self._routed)
        asked = Refining(solved, inputs, targets, run, self.steps, seed, self.on_step, routes)
        found = refine(asked)
        for path, final in {**untrained, **found.solved}.items():
            self._put(path, final.decoded)
            on_linear(path, final)
        self._run(activations)
        return found.gain

    # -- GPTQ: input groups in execution order; each is calibrated behind quantized earlier groups

    def _solve_in_order(self, activations: Activations, on_linear: OnLinear) -> BlockRunner:
        """Returns the runner that computes the outputs of the quantized block."""
        model, block = self.model, self.model.blocks[self.index]
        found = self._structure(activations)
        self._fold_channel_factors(found.groups, activations)
        final = {linear.path for linear in model.linears(self.index)} - set(self.paths)
        quantized, original = (
            BlockRunner(model, self.index, module, states, self._arguments(), found, set(final))
            for module, states in (
                (block, activations.quantized),
                (copy.deepcopy(block), activations.original),
            )
        )
        groups = [[path for path in group if path in self.paths] for group in found.groups]
        seen = {path for group in groups for path in group}
        # Linears that did not run for the first sequence come last, each alone.
        groups = [group for group in groups if group] + [[p] for p in self.paths if p not in seen]
        for paths in groups:
            experts = found.experts_of(paths)
            if experts is not None:
                self._solve_experts(experts, quantized, original, on_linear)
                quantized.mark_final(paths)
                if paths is groups[-1]:
                    original.finish()
                continue
            statistics = self._compare(paths, quantized, original, paths is groups[-1])
            self._quantize(paths, self._weights(paths), statistics, on_linear)
            quantized.mark_final(paths)
        if not groups:
            original.finish()
        return quantized

    def _compare(
        self, paths: list[str], quantized: BlockRunner, original: BlockRunner, last: bool
    ) -> Statistics:
        """Statistics of a group's input in the block quantized so far, and of its difference to the
        input in the original block."""
        statistics = Statistics(self._linear(paths[0]).in_features, self.model.device)
        statistics.placed = paths[0] in self.placed
        original.final.update(paths)
        for batch in range(len(quantized.states)):
            x = quantized.input(batch, paths[0])
            y = original.input_and_continue(batch, paths[0], whole_block=last)
            if x is not None:  # else it did not run for this batch, in one of the two models
                statistics.add(x, y if y is not None and y.shape == x.shape else None)
        return statistics

    def _solve_experts(
        self, path: str, quantized: BlockRunner, original: BlockRunner | None, on_linear: OnLinear
    ) -> None:
        """Quantize Experts from what the router sends them; their outputs are cached."""
        model, prefix = self.model, self.model.block_prefix(self.index)
        job = ExpertsJob(
            model, prefix, path, self.paths, self.scheme, self.method, self.stored_dtype
        )
        calls, originals = (
            [] if runner is None else [runner.routing(i, path) for i in range(len(runner.states))]
            for runner in (quantized, original)
        )

        def solved(linear: str, found: Solved) -> None:
            if self.method.refine is not None and found.rounding is not None:  # training runs them
                block = model.blocks[self.index]
                self.rounding.enter_context(rounded_input(block, [linear], found.rounding))
            on_linear(linear, found)

        outputs, expected = job.solve(calls, originals, solved)
        quantized.cached |= {(path, batch): output for batch, output in enumerate(outputs)}
        if original is not None:
            original.cached |= {(path, batch): output for batch, output in enumerate(expected)}

    def _structure(self, activations: Activations) -> BlockStructure:
        return probe_structure(
            self.model, self.index, activations.quantized[0][:1], self._arguments()
        )

    def _fold_channel_factors(self, groups: list[list[str]], activations: Activations) -> None:
        """For schemes that round activations: even out the channels of the linears' inputs and
        order them, as far as the layers that produce them can absorb it."""
        choose = getattr(quantizer(self.scheme), "channel_factors", None)
        order = getattr(quantizer(self.scheme), "channel_order", None)
        together = groups
        groups = [g for g in groups if all(p in self.paths and p not in self._routed for p in g)]
        if choose is None or not groups:
            return
        squares: dict[str, Tensor] = {}

        def see(path: str, x: Tensor) -> None:
            rows = x.reshape(-1, x.shape[-1]).float()
            squares[path] = squares.get(path, 0) + rows.square().sum(0)

        tokens = 0
        block = self.model.blocks[self.index]
        with idle_experts(block), observe_inputs(block, {g[0]: partial(see, g[0]) for g in groups}):
            for state in activations.quantized:
                self.model.run(self.index, state, self._arguments())
                tokens += state.shape[:2].numel()
                if tokens >= SEEN:
                    break
        for group in groups:
            source = self._fold_source(group, activations) if group[0] in squares else None
            if source is not None:
                factor = choose(self.scheme, squares[group[0]], source.row_of_column)
                if factor is not None:
                    self._fold(group, source, factor)
                    squares[group[0]] /= factor.square()
                wanted = None if order is None else order(self.scheme, squares[group[0]])
                if wanted is not None:
                    self._fold_order(group, source, wanted, together, activations)

    # -- AWQ: collect all statistics, fold scales into the preceding layers, then round

    def _solve_together(self, activations: Activations, on_linear: OnLinear) -> None:
        model, arguments = self.model, self._arguments()
        found = self._structure(activations)
        groups = [group for group in found.groups if not found.experts_of(group)]
        statistics = [Statistics(self._linear(g[0]).in_features, model.device) for g in groups]
        see = {g[0]: s.add for g, s in zip(groups, statistics, strict=True)}
        block = model.blocks[self.index]
        with idle_experts(block), observe_inputs(block, see):
            for state in activations.quantized:
                model.run(self.index, state, arguments)
        for group, known in zip(groups, statistics, strict=True):
            if self.method.folds and all(path in self.paths for path in group):
                self._fold_scales(group, known, activations)
        left = set(self.paths) - self._routed
        for group, known in zip(groups, statistics, strict=True):
            for path in (path for path in group if path in left):
                self._quantize([path], self._weights([path]), known, on_linear)
                left.remove(path)
        for path in (path for path in self.paths if path in left):
            self._quantize([path], self._weights([path]), None, on_linear)
        final = {linear.path for linear in model.linears(self.index)}
        runner = BlockRunner(
            model, self.index, block, activations.quantized, arguments, found, final - self._routed
        )
        for path in found.experts:
            self._solve_experts(path, runner, None, on_linear)
        runner.finish()

    def _fold_scales(self, group: list[str], known: Statistics, activations: Activations) -> None:
        """AWQ's scales, if there is a layer that can absorb them."""
        source = self._fold_source(group, activations)
        if source is not None:
            factor = quantizer(self.scheme).search_fold(
                self.scheme, self._weights(group), known, source.row_of_column, self.stored_dtype
            )
            self._fold(group, source, factor)
            known.rescale(1 / factor)

    # -- folding

    def _fold_source(self, group: list[str], activations: Activations) -> FoldSource | None:
        probe = activations.quantized[0][:1]
        with idle_experts(self.model.blocks[self.index]):
            return fold_source(self.model, self.index, group, probe, self._arguments())

    def _fold(self, group: list[str], source: FoldSource, factor: Tensor) -> None:  # (k,)
        """Multiply the columns of `group` by a factor and divide the outputs of the layer that
        produces their input by it."""
        for path in group:
            self._scale(path, factor)
        rows = torch.ones(source.rows, device=factor.device)
        rows[source.row_of_column] = 1 / factor
        module = self.model.blocks[self.index].get_submodule(source.path)
        if isinstance(module, nn.Linear):
            self._scale(source.path, rows[:, None])
        for parameter in module.parameters():
            if parameter.ndim == 1:  # of a norm, or a bias
                parameter.data = (parameter.data.float() * rows).to(parameter.dtype)

    def _scale(self, path: str, by: Tensor) -> None:
        self._put(path, self._linear(path).weight.data.float() * by)
        self.folded.setdefault(path, []).append(lambda weight: weight * by)

    def _fold_order(
        self,
        group: list[str],
        source: FoldSource,
        order: Tensor,  # (k,) int64
        groups: list[list[str]],
        activations: Activations,
    ) -> None:
        """Let the layers that produce the input of `group` produce it in this order, if any order
        will do (up and gate; attention's outputs move only within heads)."""
        siblings = next((each for each in groups if source.path in each), [])
        probe = activations.quantized[0][:1]
        with idle_experts(self.model.blocks[self.index]):
            found = find_reordering(
                self.model, self.index, source, group, siblings, probe, self._arguments()
            )
        if found is None or found.span < len(order):
            return
        found.apply(self.model.blocks[self.index], group, order)
        for path in found.paths:
            self.folded.setdefault(path, []).append(lambda weight: weight[order])
        for path in group:
            self.folded.setdefault(path, []).append(lambda weight: weight[:, order])
        self.placed.update(group)

    # -- shared

    @property
    def _routed(self) -> set[str]:
        """Linears of experts."""
        block = self.model.blocks[self.index]
        experts = [path for path, m in block.named_modules() if isinstance(m, Experts)]
        return {path for path in self.paths if path.startswith(tuple(f"{e}." for e in experts))}

    def _quantize(
        self, paths: list[str], weight: Tensor, statistics: Statistics | None, on_linear: OnLinear
    ) -> None:
        """Quantize linears stacked along n, split the result, and load the decoded weights."""
        solved: Solved = quantizer(self.scheme).quantize(
            self.scheme, weight, statistics, self.method.name, self.stored_dtype
        )
        start = 0
        for path in paths:
            module = self._linear(path)
            end = start + module.out_features
            part = solved.rows(start, end)
            if not module.weight.is_meta:  # else an expert's, which nothing runs
                self._put(path, part.decoded)
            on_linear(path, part)
            start = end
        if solved.rounding is not None:
            block = self.model.blocks[self.index]
            self.rounding.enter_context(rounded_input(block, paths, solved.rounding))

    def _weights(self, paths: list[str]) -> Tensor:
        """The checkpoint's weights in fp32, stacked along n, without rounding to the compute
        dtype."""
        return torch.cat([self._weight(path) for path in paths])

    def _weight(self, path: str) -> Tensor:
        model, name = self.model, f"{self.model.block_prefix(self.index)}{path}.weight"
        stored = model.checkpoint.entries[model.stored[name]].dtype
        folded = self.folded.get(path, [])
        # Exact in the block until it is quantized
        exact = model.dtype == torch.float32 or (model.dtype == stored and not folded)
        if exact and not self._linear(path).weight.is_meta:
            return self._linear(path).weight.data.float()
        weight = model.read(model.stored[name], model.device).float()
        for fold in folded:
            weight = fold(weight)
        return weight

    def _put(self, path: str, weight: Tensor) -> None:
        module = self._linear(path)
        module.weight = nn.Parameter(weight.to(self.model.dtype), requires_grad=False)

    def _run(self, activations: Activations) -> None:
        """Outputs replace inputs one by one, so that inputs are freed as outputs are made."""
        for batch, state in enumerate(activations.quantized):
            activations.quantized[batch] = self.model.run(self.index, state, self._arguments())

    def _linear(self, path: str) -> nn.Linear:
        module = self.model.blocks[self.index].get_submodule(path)
        assert isinstance(module, nn.Linear)
        return module

    def _arguments(self) -> Arguments:
        assert self.arguments is not None
        return self.arguments
