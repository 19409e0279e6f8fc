"""All experts of a layer on Hopper: one launch for gate and up, one for down, one for the sum.

With few tokens an expert the products' CTAs sort the tokens themselves (experts.cuh). With many
they are sorted first, and x is gathered in that order (experts_batch.cuh).
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.kernels import clusters, jit, tensor_map, tiles, workspace
from billfish.kernels.device import gpu, index_of
from billfish.kernels.jit import Program
from billfish.kernels.launch import Kernel
from billfish.kernels.routing import MOST_EXPERTS, Routed, Router
from billfish.kernels.routing import programs as router_programs
from billfish.schemes.base import LinearOp
from billfish.schemes.w4a16.cuda import arrange, experts_tile
from billfish.schemes.w4a16.cuda.instances import HERE, KINDS, TYPES, Kind


class Stack(NamedTuple):
    """One linear of all experts."""

    records: Tensor  # (experts, bands, k tiles, record words) int32
    n: int
    k: int

    @classmethod
    def empty(cls, experts: int, shape: arrange.Shape, device: torch.device) -> "Stack":
        size = (experts, shape.bands, shape.k_tiles, shape.record_words)
        return cls(torch.empty(size, dtype=torch.int32, device=device), shape.n, shape.k)


class CudaExperts:
    """silu(gate) * up and down of every expert; n and k are multiples of 8."""

    def __init__(
        self, kind: Kind, gate_up: Stack, down: Stack, parts: Sequence[Sequence[LinearOp]]
    ) -> None:
        self.parts, self.dtype = parts, kind.scale_dtype
        self.gate_up, self.down, device = gate_up, down, down.records.device
        self.plan = plan(index_of(device), KINDS.index(kind))

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if x.dtype != self.dtype:
            raise UserError(
                f"activations are {x.dtype}, scales of these experts {self.dtype}: their kernels "
                "take one type. Load the model in that dtype."
            )
        if not index.numel():
            return torch.zeros_like(x)
        x, index = _aligned(x), index.to(torch.int64).contiguous()
        if weights.dtype != x.dtype:
            weights = weights.float()
        run = self.plan
        routed: Routed | None = None
        if experts_tile.runs_few(index.numel(), len(self.down.records)):
            rows = run.few(self.down, run.few(self.gate_up, x, index, True), index, False)
        else:
            first, second = run.launches((self.gate_up, self.down), index.numel())
            routed = run.router.route(index, len(self.down.records), first.cut.tokens)
            rows = run.router.gather(x, routed.place)
            rows = run.many(first, self.gate_up, rows, routed, True)
            rows = run.many(second, self.down, rows, routed, False)
        place = None if routed is None else routed.place
        return run.router.combine(rows, place, weights.contiguous())

    def choose(
        self, logits: Tensor, several: int, normalized: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return self.plan.router.choose(logits.contiguous(), several, normalized, dtype)


class ExpertsPlan:
    """The kernels of one kind on one device. A gated launch must come directly before the other
    one, which reads where the tokens are before it has waited for anything."""

    def __init__(self, index: int, kind: Kind) -> None:
        self.gpu, self.kind, dtype = gpu(index), kind, kind.scale_dtype
        jit.build_all(programs(kind), self.gpu.arch)
        self.router = Router(dtype, index)
        self._few = {t: few_kernel(kind, t).load(index) for t in experts_tile.TOKENS}
        self._many = {each: many_kernel(kind, *each).load(index) for each in experts_tile.INSTANCES}

    def few(self, stack: Stack, x: Tensor, index: Tensor, gated: bool) -> Tensor:
        """A row for each pair."""
        (experts, bands, k_tiles, _), pairs = stack.records.shape, index.numel()
        how = experts_tile.few(pairs, experts, stack.n, self.kind.record_bytes, self.gpu)
        out = x.new_empty(pairs, stack.n // 2 if gated else stack.n)
        arguments = (
            stack.records.data_ptr(),
            x.data_ptr(),
            index.data_ptr(),
            out.data_ptr(),
            pairs,
            pairs // len(x),
            experts,
            stack.n,
            bands,
            stack.k,
            k_tiles,
            how.stages,
            how.own,
            how.table_bytes,
            not gated,
            gated,
        )
        kernel = self._few[how.tokens]
        kernel.launch(how.blocks, experts_tile.THREADS, arguments, how.smem, clusters.CLUSTER, True)
        return out

    def launches(self, stacks: Sequence[Stack], pairs: int) -> tuple[tiles.Launch, ...]:
        """Of `many`, for the linears of a layer."""
        layer = tuple((stack.n, stack.records.shape[2]) for stack in stacks)
        sizes = (len(stacks[0].records), layer, self.kind.record_bytes)
        return experts_tile.many(pairs, *sizes, self.gpu)

    def many(
        self, how: tiles.Launch, stack: Stack, x: Tensor, routed: Routed, gated: bool
    ) -> Tensor:
        """A row for each pair, at the pair's place."""
        pairs, sums = len(x), how.blocks * how.cut.tokens * how.cut.outputs
        left = workspace.of_stream(self.gpu.index, sums, how.flags)
        out = x.new_empty(pairs, stack.n // 2 if gated else stack.n)
        rows = tensor_map.of_rows(x.data_ptr(), pairs, stack.k, how.cut.tokens)
        arguments = (
            stack.records.data_ptr(),
            rows,
            routed.items.data_ptr(),
            out.data_ptr(),
            *(part.data_ptr() for part in left),
            stack.n,
            how.n_tiles,
            stack.records.shape[2],
            how.stages,
            not gated,
            gated,
        )
        kernel = self._many[how.cut.tokens, how.cut.bands]
        kernel.launch(how.blocks, tiles.THREADS, arguments, how.smem, pdl=True)
        return out


@cache
def plan(index: int, kind: int) -> ExpertsPlan:
    return ExpertsPlan(index, KINDS[kind])


def refuses(count: int, hidden: int, wide: int) -> bool:
    """Layers that these kernels do not take: rows are copied 16 bytes at a time."""
    return count > MOST_EXPERTS or hidden % 8 > 0 or wide % 8 > 0


@cache
def few_kernel(kind: Kind, tokens: int) -> Kernel:
    return _kernel("experts", kind, tokens)


@cache
def many_kernel(kind: Kind, tokens: int, bands: int) -> Kernel:
    return _kernel("experts_batch", kind, tokens, bands)


def _kernel(name: str, kind: Kind, *numbers: int) -> Kernel:
    types = (TYPES[kind.scale_dtype], kind.group, str(kind.zeros).lower(), *numbers)
    arguments = ", ".join(map(str, types))
    return Kernel(Program(HERE / f"{name}.cuh", f"billfish::w4a16_{name}<{arguments}>"))


def programs(kind: Kind) -> tuple[Program, ...]:
    """All kernels that the experts of a layer may need."""
    kernels = [few_kernel(kind, tokens) for tokens in experts_tile.TOKENS]
    kernels += [many_kernel(kind, *each) for each in experts_tile.INSTANCES]
    return (*(kernel.program for kernel in kernels), *router_programs(kind.scale_dtype))


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
