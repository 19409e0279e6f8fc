"""Striped products of 16-bit activations (include/billfish/striped.cuh): their shared memory and
tiles as pure functions, tested without a GPU, and their launch. stripes.py has the partition."""

from collections.abc import Callable

from torch import Tensor

from billfish.kernels import workspace
from billfish.kernels.clusters import BAND
from billfish.kernels.launch import Loaded
from billfish.kernels.stripes import STAGE_RECORDS, THREADS, Stripes, ring_stages
from billfish.kernels.tiles import SLICE

BANDS = {8: 2, 16: 2, 32: 2, 64: 4}  # tokens -> bands of a tile: MARLIN's 128 and 256 outputs

Run = Callable[[Tensor, Tensor, Tensor | None, Tensor, int], None]
"""x, whose rows begin at multiples of 16 bytes, records, bias, out, m"""


def stage_bytes(tokens: int, bands: int, record_bytes: int) -> int:
    """Bytes of a pipeline stage: four records, and the activations of their one or two slices."""
    return STAGE_RECORDS * record_bytes + STAGE_RECORDS // bands * tokens * SLICE * 2


def stages(tokens: int, bands: int, record_bytes: int) -> int:
    return ring_stages(stage_bytes(tokens, bands, record_bytes))


def smem_bytes(tokens: int, bands: int, record_bytes: int) -> int:
    """Dynamic shared memory of a CTA."""
    return stages(tokens, bands, record_bytes) * stage_bytes(tokens, bands, record_bytes)


def launcher(kernel: Loaded, tokens: int, n: int, k: int, k_tiles: int, record_bytes: int) -> Run:
    """Launches of the kernel for up to `tokens` tokens of one layer. `k_tiles` is that of all
    planes."""
    bands, index, sms = BANDS[tokens], kernel.gpu.index, kernel.gpu.sms
    how = Stripes(n, k_tiles, bands, sms)
    smem, x_k = smem_bytes(tokens, bands, record_bytes), k + -k % 8
    sums = sms * bands * BAND * tokens

    def run(x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor, m: int) -> None:
        partial, locks = workspace.of_stream(index, sums, sms)
        arguments = (
            records.data_ptr(),
            x.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            partial.data_ptr(),
            locks.data_ptr(),
            m,
            n,
            x_k,
            k_tiles,
        )
        kernel.launch(how.blocks, THREADS, arguments, smem)

    return run
