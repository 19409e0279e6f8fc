"""Launches of the fused kernels around a layer's GEMMs: embedding, norm, SwiGLU, RoPE + store,
gather, sampling.

The constructor loads every kernel, and no launch allocates, so that all can be captured in a CUDA
graph; the caller keeps tensors alive. A shape that a kernel does not support raises ValueError.
"""

import functools
from pathlib import Path

import numpy
import torch
from torch import Tensor

from billfish.engine.cuda.pool import Pool
from billfish.engine.cuda.tables import HeadNorms
from billfish.engine.kv.rotation import Rotation
from billfish.kernels import norm
from billfish.kernels.jit import Program
from billfish.kernels.launch import Kernel
from billfish.kernels.norm import CHUNK
from billfish.models.decoder import Shape

HERE = Path(__file__).parent
TYPES = {torch.float16: "billfish::Half", torch.bfloat16: "billfish::Bfloat"}
# As in the .cuh files; tests/kernels/test_layouts.py compares.
SWIGLU_THREADS = 128
STORE_WARPS = 16
DRAW_THREADS = 1024
ROTATED_GROUP = 8  # query heads of a kv head
TOGETHER = 4  # tokens that a block rotates at once; as in store.cuh
ROTATED_BLOCKS = 2  # an SM: 128 registers a thread hold the matrices
GATHER_SLOTS = 8
GATHER_BLOCKS = 8  # an SM: all its threads


def programs(dtype: torch.dtype, kind: str, head_dim: int, rotated: bool) -> tuple[Program, ...]:
    """All kernels for a model of `dtype` and a pool of this kind."""
    number, record = TYPES[dtype], f"{TYPES[dtype]}, billfish::{kind.capitalize()}, {head_dim}"
    return (
        Program(HERE / "small.cuh", f"billfish::rms_norm<{number}>"),
        Program(HERE / "small.cuh", f"billfish::swiglu<{number}>"),
        Program(HERE / "small.cuh", "billfish::embed"),
        Program(HERE / "draw.cuh", f"billfish::draw<{number}>"),
        Program(HERE / "store.cuh", f"billfish::rope_store<{record}, {str(rotated).lower()}>"),
        Program(HERE / "store.cuh", f"billfish::gather<{record}>"),
    )


class Fused:
    """Launches for one model on one device; tensors are rows of tokens, contiguous, in dtype."""

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        pool: Pool,
        cos: Tensor,  # (positions, rotary / 2), dtype
        sin: Tensor,
        rotation: Rotation | None = None,
    ) -> None:
        assert dtype == pool.dtype and cos.dtype == sin.dtype == dtype
        assert shape.head_dim == pool.head_dim and cos.shape == sin.shape
        self.shape, self.dtype, self.pool = shape, dtype, pool
        self.group, self.rotary = shape.heads // shape.kv_heads, 2 * cos.shape[1]
        if self.rotary % 8 or self.rotary > shape.head_dim:
            raise ValueError(f"RoPE over {self.rotary} of {shape.head_dim} dimensions")
        if rotation is not None and self.group > ROTATED_GROUP:
            raise ValueError(f"{self.group} query heads for a kv head, rotated")
        self.rope = cos.to(device).contiguous(), sin.to(device).contiguous()
        self._norm, self._swiglu, self._embed, self._draw, self._store, self._gather = (
            _kernel(program).load(device)
            for program in programs(dtype, pool.name, shape.head_dim, rotation is not None)
        )
        self._limit = numpy.float32(pool.limit)
        self._layer_bytes = pool.records[0].nbytes
        self._rotation: tuple[Tensor, ...] = ()
        self._threads, self._most_blocks = 32 * min(self.group + 2, STORE_WARPS), 2**31 - 1
        if rotation is not None:
            mean = rotation.mean.to(device, torch.float32).contiguous()
            self._rotation = (
                mean,
                _fragments(rotation.to_keys, device),
                _fragments(rotation.to_queries, device),
                _fragments(rotation.feedback, device),
            )
            self._threads = 2 * shape.head_dim  # a warp for 16 outputs of the rotation
            blocks = ROTATED_BLOCKS * self._store.gpu.sms // shape.kv_heads
            self._most_blocks = max(1, blocks)

    def embed(self, tokens: Tensor, found: Tensor, table: Tensor, out: Tensor) -> None:
        """Rows of the embedding; tokens (rows,) int32, where -1 - i means found[i, 0]."""
        assert tokens.dtype == found.dtype == torch.int32
        width = table.shape[1]
        if width % CHUNK:
            raise ValueError(f"an embedding of {width} numbers")
        args = (
            tokens.data_ptr(),
            found.data_ptr(),
            table.data_ptr(),
            out.data_ptr(),
            width // CHUNK,
        )
        threads = min(-(-width // CHUNK // 32) * 32, norm.THREADS)
        self._embed.launch(len(tokens), threads, args, pdl=True)

    def draw(self, logits: Tensor, rules: Tensor, found: Tensor) -> None:
        """(rows, vocabulary) and Chooser.rule of each row (rows, 8) -> (rows, 2) int32: the next
        token, and the bits of the largest logit."""
        assert rules.dtype == found.dtype == torch.int32 and rules.is_contiguous()
        args = (logits.data_ptr(), rules.data_ptr(), found.data_ptr(), logits.shape[1])
        self._draw.launch(len(logits), DRAW_THREADS, args, pdl=True)

    def norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """hidden += delta, in place; out = RMS norm of hidden, times weight."""
        tokens, width = hidden.shape
        if norm.refuses(width):
            raise ValueError(f"a norm of {width} numbers")
        more = delta.data_ptr() if delta is not None else 0
        args = (hidden.data_ptr(), more, weight.data_ptr(), out.data_ptr(), width)
        self._norm.launch(tokens, norm.threads(width), (*args, numpy.float32(eps)), pdl=True)

    def swiglu(self, gate_up: Tensor, out: Tensor) -> None:
        """(tokens, 2 width), gates first -> (tokens, width)."""
        tokens, width = out.shape
        if width % CHUNK:
            raise ValueError(f"SwiGLU of {width} numbers")
        grid = (-(-width // CHUNK // SWIGLU_THREADS), tokens)
        args = (gate_up.data_ptr(), out.data_ptr(), width)
        self._swiglu.launch(grid, SWIGLU_THREADS, args, pdl=True)

    def store(
        self,
        layer: int,
        qkv: Tensor,  # (tokens, (heads + 2 kv_heads) * head_dim)
        positions: Tensor,  # (tokens,) int32
        slots: Tensor,  # (tokens,) int32; negative: padding
        q_out: Tensor,  # (tokens, heads, head_dim)
        norms: HeadNorms | None = None,
    ) -> None:
        """Norm, RoPE and rotation of the heads: q to q_out, k and v coded into the pool."""
        assert positions.dtype == slots.dtype == torch.int32
        tokens = len(positions)
        # A block of rotated tokens takes about as long for four as for one.
        each = TOGETHER if tokens > 2 * self._most_blocks else 1 + (tokens > self._most_blocks)
        args = (
            qkv.data_ptr(),
            *(table.data_ptr() for table in self.rope),
            positions.data_ptr(),
            slots.data_ptr(),
            norms.q.data_ptr() if norms else 0,
            norms.k.data_ptr() if norms else 0,
            *([each[layer].data_ptr() for each in self._rotation] or (0, 0, 0, 0)),
            q_out.data_ptr(),
            self._records(layer),
            tokens,
            each,
            self.group,
            self.rotary,
            numpy.float32(norms.eps if norms else 0),
            self._limit,
        )
        grid = (min(-(-tokens // each), self._most_blocks), self.shape.kv_heads)
        self._store.launch(grid, self._threads, args, pdl=True)

    def gather(
        self, layer: int, slots: Tensor, count: Tensor, k_out: Tensor, v_out: Tensor
    ) -> None:
        """The first `count` (1,) of slots, both int32 -> (slots, kv_heads, head_dim) each; K as
        stored: rotated."""
        assert slots.dtype == count.dtype == torch.int32
        outs = (k_out.data_ptr(), v_out.data_ptr())
        args = (self._records(layer), slots.data_ptr(), *outs, count.data_ptr())
        most = -(-GATHER_BLOCKS * self._gather.gpu.sms // self.shape.kv_heads)
        grid = (min(-(-len(slots) // GATHER_SLOTS), most), self.shape.kv_heads)
        self._gather.launch(grid, 32 * GATHER_SLOTS, args, pdl=True)

    def _records(self, layer: int) -> int:
        return self.pool.records.data_ptr() + layer * self._layer_bytes


@functools.cache
def _kernel(program: Program) -> Kernel:
    return Kernel(program)


def _fragments(matrices: Tensor, device: torch.device) -> Tensor:
    """(layers, kv_heads, inputs, outputs) -> fp16 A fragments of mma.m16n8k16 in load order:
    16 outputs a warp, 16 inputs at a time, 16 bytes a lane. Row r of a fragment is output 2r, row
    r + 8 is output 2r + 1, so that a lane gets neighbours."""
    layers, kv_heads, size, _ = matrices.shape
    tiles = size // 16
    # inputs: step, upper 8, quad's place, neighbour; outputs: warp, row, lower rows
    split = matrices.reshape(layers, kv_heads, tiles, 2, 4, 2, tiles, 8, 2)
    order = split.permute(0, 1, 6, 2, 7, 4, 3, 8, 5)
    return order.to(device, torch.float16).contiguous().view(layers, kv_heads, size, size)
