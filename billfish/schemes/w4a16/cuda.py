"""w4a16 on an NVIDIA GPU: records in memory, our own kernels, torch's current stream.

Up to 16 tokens run in w4a16_decode at the speed of memory, up to 64 in slices of 16, more through
decoded panels and the library's matrix product. All of it is one operator of torch, so that
torch.compile traces it and CUDA graphs capture it. Nothing compiles after the first `load`.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from billfish.errors import UserError
from billfish.kernels.device import Gpu, gpu
from billfish.kernels.jit import Program
from billfish.kernels.launch import Kernel, Loaded
from billfish.schemes.base import Tensors
from billfish.schemes.w4a16 import arrange
from billfish.schemes.w4a16.tile import MOST_TOKENS, Tile, pick_tile

if TYPE_CHECKING:
    from billfish.schemes.w4a16.scheme import W4A16

HERE = Path(__file__).parent
TYPES = {torch.float16: "billfish::Half", torch.bfloat16: "billfish::Bfloat"}
DECODE_THREADS = 320  # decode.cuh: two warps that copy, eight that multiply
PANEL_THREADS = 256
MOST_SLICES = 4
PANEL_WEIGHTS = 2**25  # decoded at once: 64 MB, about what L2 keeps


@dataclass(frozen=True)
class Kind:
    """What names an instance of the kernels, beside the activations' type."""

    group: int  # of a record: 32, 64, 128
    zeros: bool
    planes: int
    scale_dtype: torch.dtype

    @property
    def record_bytes(self) -> int:
        groups = arrange.K // self.group
        return arrange.WORDS * 4 + groups * (128 + (32 if self.zeros else 0))


KINDS = [
    Kind(group, zeros, planes, dtype)
    for group in (32, 64, 128)
    for zeros in (False, True)
    for planes in (1, 2)
    for dtype in TYPES
]


def _name(kernel: str, *arguments: object) -> str:
    words = [str(a).lower() if isinstance(a, bool) else str(a) for a in arguments]
    return f"billfish::{kernel}<{', '.join(words)}>"


@functools.cache
def decode_kernel(kind: Kind, dtype: torch.dtype, tokens: int, bands: int) -> Kernel:
    name = _name("w4a16_decode", TYPES[dtype], TYPES[kind.scale_dtype], kind.group, kind.zeros,
                 tokens, bands)  # fmt: skip
    return Kernel(Program(HERE / "decode.cuh", name))


@functools.cache
def panel_kernel(kind: Kind, dtype: torch.dtype) -> Kernel:
    name = _name("w4a16_panel", TYPES[dtype], TYPES[kind.scale_dtype], kind.group, kind.zeros,
                 kind.planes)  # fmt: skip
    return Kernel(Program(HERE / "panel.cuh", name))


class Plan:
    """One layer's launches on one device, looked up once and kept."""

    def __init__(self, index: int, n: int, k: int, kind: Kind, dtype: torch.dtype) -> None:
        self.n, self.k, self.kind, self.dtype = n, k, kind, dtype
        self.gpu: Gpu = gpu(index)
        self.bands, self.k_tiles = -(-n // arrange.N), -(-k // arrange.K) * kind.planes
        self.tiles = {tokens: self._pick(tokens) for tokens in (8, 16)}
        self.panel = panel_kernel(kind, dtype).load(index)
        self.decode: dict[int, Loaded] = {
            tokens: decode_kernel(kind, dtype, tokens, tile.bands).load(index)
            for tokens, tile in self.tiles.items()
        }

    def _pick(self, tokens: int) -> Tile:
        return pick_tile(tokens, self.n, self.k_tiles, self.kind.record_bytes, self.gpu.sms,
                         self.gpu.smem_per_sm)  # fmt: skip

    def run(self, x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """x (m, k) contiguous, its rows on multiples of 16 bytes, m <= 16."""
        m = x.shape[0]
        tokens = 8 if m <= 8 else 16
        tile = self.tiles[tokens]
        self.decode[tokens].launch(
            tile.blocks, DECODE_THREADS,
            (records.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(),
             out.data_ptr(), m, self.n, x.shape[1], self.k_tiles, tile.stages),
            tile.smem, tile.cluster, True,
        )  # fmt: skip

    def decoded(self, records: Tensor, start: int, end: int) -> Tensor:
        """Weights of bands [start, end): (rows, k)."""
        rows = min(end * arrange.N, self.n) - start * arrange.N
        out = torch.empty(rows, self.k, dtype=self.dtype, device=records.device)
        self.panel.launch(
            (self.k_tiles // self.kind.planes, end - start), PANEL_THREADS,
            (records[start].data_ptr(), out.data_ptr(), rows, self.k),
        )  # fmt: skip
        return out


@functools.cache
def plan(index: int, n: int, k: int, kind: int, dtype: torch.dtype) -> Plan:
    return Plan(index, n, k, KINDS[kind], dtype)


def linear(x: Tensor, records: Tensor, bias: Tensor | None, n: int, k: int, kind: int) -> Tensor:
    """x (m, k) -> (m, n)."""
    m = x.shape[0]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m == 0:
        return out
    how = plan(x.device.index, n, k, kind, x.dtype)
    if m > MOST_TOKENS * MOST_SLICES:
        step = max(1, PANEL_WEIGHTS // (k * arrange.N))
        for start in range(0, how.bands, step):
            weight = how.decoded(records, start, min(start + step, how.bands))
            torch.mm(x, weight.T, out=out[:, start * arrange.N :][:, : len(weight)])
        return out if bias is None else out.add_(bias)
    if k % 8:
        x = pad(x, (0, -k % 8))
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    for start in range(0, m, MOST_TOKENS):
        how.run(x[start : start + MOST_TOKENS], records, bias, out[start : start + MOST_TOKENS])
    return out


_library = torch.library.Library("billfish", "FRAGMENT")
_library.define(
    "w4a16_linear(Tensor x, Tensor records, Tensor? bias, int n, int k, int kind) -> Tensor"
)
_library.impl("w4a16_linear", linear, "CUDA")


@torch.library.register_fake("billfish::w4a16_linear", lib=_library)
def _shape(x: Tensor, records: Tensor, bias: Tensor | None, n: int, k: int, kind: int) -> Tensor:
    return x.new_empty(x.shape[0], n)


class CudaOp:
    name: ClassVar[str] = "cuda"

    @staticmethod
    def refuses(scheme: "W4A16", n: int, k: int, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its weights are on {device}; move the model to a GPU with model.to('cuda')."
        size = scheme.group_size
        if size not in (-1, k) and size % 32:
            return f"groups of {size}; its kernels take multiples of 32, and -1."
        return None

    def __init__(self, scheme: "W4A16", tensors: Tensors) -> None:
        self.scheme = scheme
        tensors = dict(tensors)
        self.g_idx = tensors.pop("weight_g_idx", None)
        self.order: Tensor | None = None
        self.shape, self.records = arrange.pack(scheme, tensors)
        shape = self.shape
        self.kind = KINDS.index(
            Kind(shape.record_group, shape.zeros, shape.planes, shape.scale_dtype)
        )

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        shape = self.shape
        y: Tensor = torch.ops.billfish.w4a16_linear(
            x.reshape(-1, shape.k), self.records, bias, shape.n, shape.k, self.kind
        )
        return y.view(*x.shape[:-1], shape.n)

    def canonical(self) -> dict[str, Tensor]:
        return arrange.unpack(self.scheme, self.shape, self.records)

    def nbytes(self) -> int:
        return self.records.nbytes


def programs(scheme: "W4A16", dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
    raise UserError("later")
