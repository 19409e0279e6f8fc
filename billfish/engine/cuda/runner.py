"""The model on a Hopper GPU: five to eight launches a layer, and a CUDA graph for every batch size.

A step of decodes replays the graph of the next larger batch size, over tables filled for this step;
so does one of few tokens in all, with prompts among them (rows.py), whose K and V are stored before
any is read. Others, up to some number of tokens, are one graph if they have few prefill chunks
(prefill.py), or graphs of what lies between attention (segments.py); beyond it they are launched
kernel by kernel. No call waits for the GPU: the host prepares a step while the one before it runs.
"""

import itertools
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Many
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from billfish.engine.cuda import fused, tables
from billfish.engine.cuda.chunks import Chunking
from billfish.engine.cuda.fused import Fused
from billfish.engine.cuda.pool import POOLS, Pool
from billfish.engine.cuda.prefill import Prefill, Steps, slots_of
from billfish.engine.cuda.rows import MOST_ROWS, can_be_rows
from billfish.engine.cuda.segments import Attend, Segments, Space, sizes
from billfish.engine.cuda.tables import DecodeAttention, HeadNorms, Tables
from billfish.engine.kv.rotation import Rotation
from billfish.engine.runner import Decoded, Rules, last_rows
from billfish.engine.scheduler import Piece
from billfish.kernels import jit, norm
from billfish.kernels.device import HOPPER, gpu
from billfish.models.decoder import Decoder
from billfish.models.joined import Product, norm_input


def refuses(decoder: Decoder, kv: str) -> str | None:
    """Why these kernels cannot run the model; torch's operators run it then."""
    shape, device = decoder.shape, decoder.device
    if device.type != "cuda":
        return f"the model is on {device}"
    if (found := torch.cuda.get_device_capability(device)) != HOPPER:
        return f"its kernels are for compute capability 9.0; this GPU has {found[0]}.{found[1]}"
    if decoder.slow_mixtures():
        return (
            "it has mixtures of experts that run one after the other; all at once run SwiGLU "
            "experts of w4a16 in up to 4 bits, without biases, not batch invariant"
        )
    if decoder.sinks(0) is not None:
        return "it has attention sinks"
    group, width = shape.heads // shape.kv_heads, decoder.embed.weight.shape[1]
    rotary = decoder.rope(torch.zeros(1, dtype=torch.int64, device=device))[0].shape[1]
    if decoder.dtype not in tables.TYPES:
        return f"its kernels take float16 and bfloat16, not {decoder.dtype}"
    if kv not in POOLS:
        return f"its kernels take {', '.join(POOLS)}, not {kv}"
    if shape.head_dim not in tables.HEAD_DIMS or rotary % 8:
        return f"heads of {shape.head_dim}, {rotary} of them turned by RoPE: it takes 64 and 128"
    if group > tables.MOST_GROUP:
        return f"{group} heads share a K head; its kernels take at most {tables.MOST_GROUP}"
    if norm.refuses(width):
        return f"hidden states of {width}; its kernels take multiples of 8 up to {norm.MOST_WIDTH}"
    return None


def buckets(most: int) -> list[int]:
    """Batch sizes that get a graph, the largest first: a step is padded to the next one."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 1025, 32)]
    return sorted({*(size for size in sizes if size < most), most}, reverse=True)


class GpuRunner:
    """Pieces -> hidden states or logits, on one GPU."""

    asynchronous = True

    def __init__(
        self,
        decoder: Decoder,
        pool: Pool,
        most_sequences: int,
        most_tokens: int,  # of one sequence
        rotation: Rotation | None = None,
        graphs: bool = True,
        invariant: bool = False,  # batch invariant: a row's bits do not depend on the others
        by_rows: bool = True,  # prompts of small steps as decodes: other last bits than in large
        budget: int = 0,  # tokens of a step with prompts, at most; those get graphs, too
    ) -> None:
        self.decoder, self.pool, self.shape = decoder, pool, decoder.shape
        self.by_rows = by_rows and graphs
        most_rows = max(most_sequences, MOST_ROWS) if self.by_rows else most_sequences
        shape, dtype, device = decoder.shape, decoder.dtype, decoder.device
        programs = fused.programs(dtype, pool.name, shape.head_dim, rotation is not None)
        positions = torch.arange(most_tokens, device=device)
        cos, sin = (table[:, : table.shape[1] // 2] for table in decoder.rope(positions))
        # Decodes' attention does RoPE and stores K and V itself.
        self.joins = pool.name in tables.JOINED
        attends = [tables.program(shape, dtype, pool.name, j) for j in {False, self.joins}]
        jit.build_all([*programs, *attends], gpu(device).arch, _say)
        self.fused = Fused(shape, dtype, device, pool, cos, sin, rotation)
        chunking = Chunking(pool.name, shape.kv_heads, gpu(device).sms, invariant)
        self.tables = Tables(most_rows, most_tokens, shape.windows, chunking, device)
        rope = self.fused.rope if self.joins else None
        self.attention = DecodeAttention(shape, dtype, pool, self.tables, rope)
        # By the number of rows, and whether K and V are stored apart.
        self.graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        # Each row's next token and largest logit; read by the next decode, and by the host from
        # two pinned buffers by turns: one is read while the other is written.
        self.found = torch.zeros(most_rows, 2, dtype=torch.int32, device=device)
        places = [torch.zeros_like(self.found, device="cpu").pin_memory() for _ in range(2)]
        self._landings = itertools.cycle([(place, torch.Event("cuda")) for place in places])
        for apart in {True, not self.joins}:  # loads every kernel: none can be in a capture
            self._step(most_rows, apart)
        self.steps: Steps | None = None
        self.segments: Segments | None = None
        if graphs:
            self._capture(most_sequences if self.joins else most_rows)
            if budget:
                self._capture_prompts(sizes(budget))

    @torch.inference_mode()
    def run(self, pieces: Many[Piece], rules: Rules | None = None) -> Decoded:
        """Logits of the pieces that sample, and with rules their next tokens."""
        if all(piece.count == 1 and piece.samples for piece in pieces):
            logits = self._decode(pieces, rules)
        elif self.by_rows and can_be_rows(pieces):
            logits = self._decode(pieces, rules, last := last_rows(pieces))
            at = self.tables.columns["last"][: len(last)]
            logits = logits.index_select(0, at)
            self.found[: len(at)] = self.found.index_select(0, at)
        else:
            hidden = self.hidden(pieces, rules, last := last_rows(pieces))
            at = self.tables.columns["last"][: len(last)]
            logits = self.decoder.head(hidden.index_select(0, at))
            if rules:
                self.fused.draw(logits, self.tables.columns["rules"], self.found)
        if rules is None:
            return Decoded(logits)
        count, (place, landed) = len(logits), next(self._landings)
        place[:count].copy_(self.found[:count], non_blocking=True)
        landed.record()
        return Decoded(logits, place[:count], landed)

    def _decode(
        self, pieces: Many[Piece], rules: Rules | None, last: Many[int] | None = None
    ) -> Tensor:
        """One token of each piece; with `last`, the rows that sample, a row for every token."""
        fresh = last is not None
        apart = fresh or not self.joins
        count = sum(piece.count for piece in pieces) if fresh else len(pieces)
        fit = (size for size, how in self.graphs if how == apart and size >= count)
        rows = min(fit, default=count)
        self.tables.fill(pieces, rows, rules, fresh, last or ())
        if (rows, apart) not in self.graphs:
            return self._step(rows, apart)[:count]
        graph, logits = self.graphs[rows, apart]
        graph.replay()
        return logits[:count]

    @torch.inference_mode()
    def hidden(
        self, pieces: Many[Piece], rules: Rules | None = None, last: Many[int] = ()
    ) -> Tensor:
        """(tokens of all pieces, hidden), valid until the next step. Pieces of one token come
        first, and their attention is a decode's. `last`: of Tables.fill."""
        single = next((i for i, piece in enumerate(pieces) if piece.count > 1), len(pieces))
        chunks, tables = pieces[single:], self.tables
        tables.fill(pieces[:single], single, rules, last=last)
        slots = [slots_of(piece) for piece in chunks]
        columns = np.empty((3, single + sum(piece.count for piece in chunks)), np.int32)
        for column, name in zip(columns, ("tokens", "positions", "slots"), strict=True):
            column[:single] = tables.column(name, single)
        at = single
        for piece, own in zip(chunks, slots, strict=True):
            first, end = piece.start, piece.start + piece.count
            here = slice(at, at := at + piece.count)
            columns[0, here] = piece.sequence.part(first, end)
            columns[1, here] = np.arange(first, end)
            columns[2, here] = own[first:]
        if self.steps and (rows := self.steps.size(at, chunks)):
            return self.steps.run(rows, self._pinned, columns, single, chunks, slots)
        dtype = self.decoder.dtype
        prefill = (
            Prefill.of(self.fused, self.shape, dtype, chunks, slots, self._upload)
            if chunks
            else None
        )

        def attend(layer: int, q: Tensor, space: Space) -> None:
            if single:
                self._attend(layer, q, space)
            if prefill:
                space.mixed[single:] = prefill(layer, q[single:])

        if self.segments and (rows := self.segments.size(at)):
            return self.segments.run(rows, self._pinned, columns, attend)
        flat = self._upload(columns)
        return self._forward(flat[0], flat[1], flat[2], attend)

    def _pinned(self, numbers: NDArray[np.int32]) -> Tensor:
        """Copied from there, the host does not wait for the steps before. PyTorch gives the memory
        to nobody else before such a copy is done."""
        return torch.from_numpy(numbers).pin_memory()

    def _upload(self, numbers: NDArray[np.int32]) -> Tensor:
        return self._pinned(numbers).to(self.decoder.device, non_blocking=True)

    @torch.inference_mode()
    def _step(self, rows: int, apart: bool) -> Tensor:
        """The decode that the tables describe; `apart`: K and V are stored before attention."""
        columns = self.tables.columns
        tokens, positions, slots = (columns[n][:rows] for n in ("tokens", "positions", "slots"))
        attend = self._attend if apart else self._attend_joined
        hidden = self._forward(tokens, positions, slots, attend, apart)
        logits: Tensor = self.decoder.head(hidden)
        self.fused.draw(logits, columns["rules"], self.found)
        return logits

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        attend: Attend,
        apart: bool = True,
    ) -> Tensor:
        space = self.space(len(tokens))
        for layer, given in self.between(tokens, positions, slots, space, apart):
            attend(layer, given, space)
        return space.x

    def _attend(self, layer: int, q: Tensor, space: Space) -> None:
        self.attention(layer, q, space.mixed)

    def _attend_joined(self, layer: int, qkv: Tensor, space: Space) -> None:
        self.attention.of_projection(layer, qkv, space.mixed, self._head_norms(layer))

    def _head_norms(self, layer: int) -> HeadNorms | None:
        attention = self.decoder.layers[layer].self_attn
        q, k = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        if q is None or k is None:
            return None
        return HeadNorms(q.weight, k.weight, q.variance_epsilon)

    def space(self, rows: int) -> Space:
        table, shape = self.decoder.embed.weight, self.shape
        q = table.new_empty(rows, shape.heads, shape.head_dim)
        return Space(q, torch.empty_like(q), table.new_empty(rows, table.shape[1]))

    def between(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        space: Space,
        apart: bool = True,
    ) -> Iterator[tuple[int, Tensor]]:
        """Everything but attention: yields each layer when its attention is to be computed, into
        space.mixed, and from what: space.q, or, not `apart`, what q, k and v are projected to. In
        the end space.x has the normed hidden states."""
        decoder, fused, x = self.decoder, self.fused, space.x
        table, count, delta = decoder.embed.weight, len(tokens), None
        hidden = torch.empty_like(x)
        fused.embed(tokens, self.found, table, hidden)
        for index, layer in enumerate(decoder.layers):
            attention, product = layer.self_attn, decoder.qkv(index)
            given, hidden = self._normed(product, layer.input_layernorm, hidden, delta, x)
            qkv = product(given)
            if apart:
                norms = self._head_norms(index)
                fused.store(index, qkv, positions, slots, space.q, norms)
            yield index, space.q if apart else qkv
            delta = attention.o_proj(space.mixed.flatten(1))
            if index in decoder.mixtures:
                norm = layer.post_attention_layernorm
                fused.norm(hidden, delta, norm.weight, norm.variance_epsilon, x)
                delta = decoder.mixture(index, x)
                continue
            gated = decoder.gated(index)
            product = decoder.gate_up(index) if gated is None else gated
            norm = layer.post_attention_layernorm
            given, hidden = self._normed(product, norm, hidden, delta, x)
            y = product(given)
            if gated is None:
                both = y
                y = both.new_empty(count, both.shape[1] // 2)
                fused.swiglu(both, y)
            delta = layer.mlp.down_proj(y)
        norm = decoder.norm
        fused.norm(hidden, delta, norm.weight, norm.variance_epsilon, x)

    def _normed(
        self, product: Product, norm: Any, hidden: Tensor, delta: Tensor | None, x: Tensor
    ) -> tuple[Any, Tensor]:
        """The norm of hidden + delta as the product's input, by its op if that has a kernel for
        both; and the sum, which is there when the product is."""
        weight, eps = norm.weight, norm.variance_epsilon
        found = norm_input(product, hidden, delta, weight, eps)
        if found is not None:
            return found
        self.fused.norm(hidden, delta, weight, eps, x)
        return x, hidden

    def _capture(self, most_decodes: int) -> None:
        kinds = [(rows, not self.joins) for rows in buckets(most_decodes)]
        if self.by_rows and self.joins:
            kinds += [(rows, True) for rows in buckets(MOST_ROWS)]
        pool = torch.cuda.graph_pool_handle()
        for number, (rows, apart) in enumerate(sorted(kinds, reverse=True), 1):
            _say(f"CUDA graphs {number}/{len(kinds)}")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._step(rows, apart)
            self.graphs[rows, apart] = graph, logits
        torch.cuda.synchronize()

    @torch.inference_mode()
    def _capture_prompts(self, numbers: Many[int]) -> None:
        _say(f"CUDA graphs of up to {max(numbers)} tokens with prompts")
        prefill = partial(Prefill, self.fused, self.shape, self.decoder.dtype)

        def forward(columns: Tensor, attend: Attend) -> Tensor:
            tokens, positions, slots = columns
            return self._forward(tokens, positions, slots, attend)

        self.steps = Steps(forward, self._attend, prefill, numbers, self.decoder.device)
        self.segments = Segments(self.between, self.space(max(numbers)), numbers)
        torch.cuda.synchronize()


def _say(message: str) -> None:
    """A line on a terminal that the next one overwrites."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{message}", end="", file=sys.stderr, flush=True)
