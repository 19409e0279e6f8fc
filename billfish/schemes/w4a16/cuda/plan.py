"""Chooses the kernel and the tile configuration that run m tokens of one layer on one GPU.

Up to 16 tokens take one memory-bound launch (w4a16_decode from sm_90 on, w4a16_stripe from sm_80
on). More, and in some layers 9 and more, run on w4a16_batch, Hopper's wgmma kernel. Where that
cannot run, x is split into up to four slices of 16 (decode) or 64 tokens (stripe); beyond, weights
are decoded panel by panel for PyTorch's matrix product. All of it is one torch operator, for
torch.compile and CUDA graphs.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from billfish.errors import UserError
from billfish.kernels import clusters, striped, tensor_map, tiles, workspace
from billfish.kernels.device import gpu
from billfish.kernels.launch import Loaded
from billfish.schemes.w4a16.cuda import arrange, batch, normed, tile
from billfish.schemes.w4a16.cuda.gated import apart
from billfish.schemes.w4a16.cuda.instances import (
    KINDS,
    TYPES,
    Kind,
    batch_kernel,
    few_kernel,
    panel_kernel,
    runs_batches,
    stripe_tokens,
)

PANEL_THREADS = 256  # panel.cuh
# Each slice reads the weights again; decoded weights are written and read in 16 bits, 8 times as
# many bytes as 4-bit weights read once.
MOST_SLICES = 4
# Most tokens of codes in two planes that w4a16_batch takes: it multiplies twice as often. 128256 x
# 4096: 739 us for 256 tokens, 3136 for 1024, where the product of decoded weights takes 1803.
TWO_PLANES = 256
PANEL_WEIGHTS = 2**25  # of a panel: 64 MB, about the size of L2

Path = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]  # x, records, bias, out


class Plan:
    """Everything about one layer's launches on one device that is the same in every call."""

    def __init__(self, index: int, n: int, k: int, kind: Kind, dtype: torch.dtype) -> None:
        self.n, self.k, self.kind, self.dtype = n, k, kind, dtype
        self.bands, self.k_tiles = -(-n // arrange.N), -(-k // arrange.K) * kind.planes
        self.panel = panel_kernel(kind, dtype).load(index)
        if kind.kernel == "decode":
            self.few = {tokens: self._decode(index, tokens) for tokens in tile.TOKENS}
        else:
            self.few = {t: self._stripe(index, t) for t in stripe_tokens(kind, dtype)}
        self.most = max(self.few)
        self.normed = normed.launches(index, n, k, kind, dtype)
        self.gpu, self.cuts = gpu(index), dict[tuple[int, bool], tiles.Launch]()
        self.paths: dict[tuple[int, bool, bool], Path] = {}
        self.batches: dict[tiles.Instance, Loaded] = {}
        if runs_batches(kind, dtype, self.gpu.arch):
            for instance in batch.INSTANCES:
                self.batches[instance] = batch_kernel(kind, dtype, instance).load(index)

    def batch(
        self,
        x: Tensor,
        records: Tensor,
        bias: Tensor | None,
        out: Tensor,
        m: int,
        invariant: bool,
        gated: bool = False,
    ) -> None:
        how = self.cuts.get((m, invariant))
        if how is None:
            pick = batch.pick_invariant if invariant else batch.pick
            how = pick(m, self.n, self.k_tiles, self.kind.record_bytes, self.gpu)
            self.cuts[m, invariant] = how
        cut, index = how.cut, self.gpu.index
        rows = tensor_map.of_rows(x.data_ptr(), m, self.k + -self.k % 8, cut.tokens)
        sums = locks = 0
        if how.sums:
            left = workspace.of_stream(index, how.sums, how.flags)
            sums, locks = left[0].data_ptr(), left[1].data_ptr()
        arguments = (
            records.data_ptr(),
            rows,
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            sums,
            locks,
            m,
            self.n,
            how.m_tiles,
            how.n_tiles,
            self.k_tiles,
            self.k_tiles // self.kind.planes,
            how.whole,
            cut.splits,
            cut.twins,
            how.stages,
            how.early,
            gated,
        )
        kernel = self.batches[cut.instance]
        kernel.launch(how.blocks, cut.threads, arguments, how.asked, how.cluster, True)

    def _decode(self, index: int, tokens: int) -> Callable[..., None]:
        how = tile.pick_tile(tokens, self.n, self.k, self.kind.record_bytes, gpu(index))
        kernel = few_kernel(self.kind, self.dtype, tokens, how.bands, how.cluster).load(index)
        n, x_k, k_tiles = self.n, self.k + -self.k % 8, self.k_tiles
        threads = tile.threads(how.bands)

        def run(
            x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor, m: int, gated: bool
        ) -> None:
            arguments = (
                records.data_ptr(),
                x.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                m,
                n,
                x_k,
                k_tiles,
                how.stages,
                gated,
            )
            kernel.launch(how.blocks, threads, arguments, how.asked, how.cluster, True)

        return run

    def _stripe(self, index: int, tokens: int) -> Callable[..., None]:
        kernel = few_kernel(self.kind, self.dtype, tokens, striped.BANDS[tokens]).load(index)
        sizes = (self.n, self.k, self.k_tiles, self.kind.record_bytes)
        launch = striped.launcher(kernel, tokens, *sizes)

        def run(
            x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor, m: int, gated: bool
        ) -> None:
            assert not gated
            launch(x, records, bias, out, m)

        return run

    def decoded(self, records: Tensor, start: int, end: int) -> Tensor:
        """Decoded weights of bands [start, end): (rows, k)."""
        rows = min(end * arrange.N, self.n) - start * arrange.N
        out = torch.empty(rows, self.k, dtype=self.dtype, device=records.device)
        grid = (self.k_tiles // self.kind.planes, end - start)
        arguments = (records[start].data_ptr(), out.data_ptr(), rows, self.k)
        self.panel.launch(grid, PANEL_THREADS, arguments)
        return out

    # -- choice of the kernel for m tokens

    def path(self, m: int, invariant: bool, gated: bool) -> Path:
        """The function that runs m tokens, cached for each m; `gated`: it stores silu(gate) *
        up."""
        found = self.paths.get((m, invariant, gated))
        if found is None:
            found = self.paths[m, invariant, gated] = self._path(m, invariant, gated)
        return found

    def _path(self, m: int, invariant: bool, gated: bool) -> Path:
        batches = self.batches and (self.kind.planes == 1 or m <= TWO_PLANES)
        if gated and not batches:  # x and scales have different dtypes, or a panel is decoded
            return self._gated_after(self.path(m, invariant, False))
        if invariant and not self.batches:
            raise UserError(
                f"activations are {self.dtype}, scales of this layer {self.kind.scale_dtype}: an "
                "invariant layer takes those of its scales' type. Load the model in that dtype."
            )
        if invariant:
            kernel = partial(self.batch, invariant=True, gated=gated)
            return self._slices(m, batch.MOST_INVARIANT, lambda rows: kernel)
        if batches and (m > clusters.MOST_TOKENS or self._batches_few(m)):
            return self._one(m, partial(self.batch, invariant=False, gated=gated))
        if m <= clusters.MOST_TOKENS:
            return self.few_path(m, gated)
        if m <= self.most * MOST_SLICES:
            return self._slices(m, self.most, lambda rows: partial(self._few(rows), gated=False))
        return self._panels

    def _batches_few(self, m: int) -> bool:
        if (m, False) in self.cuts:  # `bench tune` tries it
            return True
        return self.kind.planes == 1 and batch.takes_few(
            m, self.n, self.k_tiles, self.kind.record_bytes, self.gpu
        )

    def few_path(self, m: int, gated: bool = False) -> Path:
        """On the kernel of few tokens, whatever else could run them."""
        return self._one(m, partial(self._few(m), gated=gated))

    def _few(self, m: int) -> Callable[..., None]:
        return self.few[min(tokens for tokens in self.few if tokens >= m)]

    def _one(self, m: int, kernel: Callable[..., None]) -> Path:
        """One launch for all rows; x is made aligned and contiguous. A decode step pays for every
        Python frame on this way, which is why slices have a closure of their own."""
        padding = -self.k % 8

        def run(x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor) -> None:
            if padding:
                x = pad(x, (0, padding))
            if not x.is_contiguous():
                x = x.contiguous()
            if x.data_ptr() % 16:
                x = x.clone()
            kernel(x, records, bias, out, m)

        return run

    def _slices(self, m: int, most: int, kernel: Callable[[int], Callable[..., None]]) -> Path:
        """A launch for every `most` rows."""
        sizes = [min(most, m - start) for start in range(0, m, most)]
        calls = [self._one(rows, kernel(rows)) for rows in sizes]

        def run(x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor) -> None:
            xs, outs = torch.split(x.reshape(m, -1), sizes), torch.split(out.view(m, -1), sizes)
            for call, some, made in zip(calls, xs, outs, strict=True):
                call(some, records, bias, made)

        return run

    def _gated_after(self, path: Path) -> Path:
        def run(x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor) -> None:
            both = x.new_empty((*x.shape[:-1], self.n))
            path(x, records, bias, both)
            gate, up = apart(both).chunk(2, -1)
            torch.mul(silu(gate), up, out=out)

        return run

    def _panels(self, x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Decode a panel of weights at a time and multiply it with PyTorch."""
        rows, outs = x.reshape(-1, self.k), out.view(-1, self.n)
        step = max(1, PANEL_WEIGHTS // (self.k * arrange.N))
        for start in range(0, self.bands, step):
            weight = self.decoded(records, start, min(start + step, self.bands))
            end = start * arrange.N + len(weight)
            outs[:, start * arrange.N : end] = rows @ weight.T
        if bias is not None:
            out.add_(bias)


@cache
def plan(index: int, n: int, k: int, kind: int, dtype: torch.dtype) -> Plan:
    return Plan(index, n, k, KINDS[kind], dtype)


def linear(
    x: Tensor,
    records: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    kind: int,
    invariant: bool,
    gated: bool = False,
) -> Tensor:
    """x (..., k) -> (..., n) in x's dtype. Allocates the result and, for decoded weights, a panel.
    `gated`: (..., n / 2), silu(gate) * up of rows interleaved as in gated.py, without bias."""
    shape, dtype = x.shape, x.dtype
    if dtype not in TYPES:
        raise UserError(f"activations are {dtype}; CUDA kernels take float16 and bfloat16.")
    if shape[-1] != k:
        raise ValueError(f"activations have {shape[-1]} columns, the layer takes {k}")
    if x.device != records.device:
        raise ValueError(f"activations are on {x.device}, the layer on {records.device}")
    out = x.new_empty((*shape[:-1], n // 2 if gated else n))
    m = x.numel() // k
    if m:
        if bias is not None:
            bias = bias.to(x.device, dtype).contiguous()
        path = plan(x.get_device(), n, k, kind, dtype).path(m, invariant, gated)
        path(x, records, bias, out)
    return out


def normed_linear(
    x: normed.Normed, records: Tensor, bias: Tensor | None, n: int, k: int, kind: int, gated: bool
) -> Tensor:
    """`linear` of (m, k) that the product norms itself."""
    m, dtype = len(x.hidden), x.hidden.dtype
    out = x.hidden.new_empty(m, n // 2 if gated else n)
    if bias is not None:
        bias = bias.to(out.device, dtype).contiguous()
    plan(out.get_device(), n, k, kind, dtype).normed[m](x, records, bias, out, gated)
    return out


# The operator that torch.compile and dispatch modes see. Eager calls use `linear` directly: around
# a launch of 5 us, Library.impl adds 5 us a call and the custom_op decorator 22.
_library = torch.library.Library("billfish", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "w4a16_linear(Tensor x, Tensor records, Tensor? bias, int n, int k, int kind, "
    "bool invariant, bool gated=False) -> Tensor"
)
_library.impl("w4a16_linear", linear, "CUDA")  # type: ignore[no-untyped-call]
operator = torch.ops.billfish.w4a16_linear.default


@torch.library.register_fake("billfish::w4a16_linear", lib=_library)  # type: ignore[untyped-decorator]
def _fake(
    x: Tensor,
    records: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    kind: int,
    invariant: bool,
    gated: bool = False,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], n // 2 if gated else n)
