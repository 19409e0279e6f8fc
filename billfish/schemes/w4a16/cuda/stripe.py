"""Shared memory and tiles of w4a16_stripe: stripe.cuh's arithmetic as pure functions, tested
without a GPU. kernels/stripes.py has the partition."""

from billfish.formats.layout import BRICK_K
from billfish.kernels.stripes import STAGE_RECORDS, ring_stages

BANDS = {8: 2, 16: 2, 32: 2, 64: 4}  # tokens -> bands of a tile: MARLIN's 128 and 256 outputs


def stage_bytes(tokens: int, bands: int, record_bytes: int) -> int:
    """Bytes of a pipeline stage: four records, and the activations of their one or two slices."""
    return STAGE_RECORDS * record_bytes + STAGE_RECORDS // bands * tokens * BRICK_K * 2


def stages(tokens: int, bands: int, record_bytes: int) -> int:
    return ring_stages(stage_bytes(tokens, bands, record_bytes))


def smem_bytes(tokens: int, bands: int, record_bytes: int) -> int:
    """Dynamic shared memory of a CTA."""
    return stages(tokens, bands, record_bytes) * stage_bytes(tokens, bands, record_bytes)
