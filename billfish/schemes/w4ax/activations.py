"""Activations in whole numbers: one dynamic scale for each token, bytes from -127 to 127.

    a = max |x|    s = a / 127    x8 = round(x * (127 / a)), ties to even

All in fp32, with two divisions for each token, so that every device rounds alike. A token of zeros
has s = 0. In one with Inf or NaN all x8 are 0 and s is Inf or NaN, and 0 times it makes all its
outputs NaN.

fmpq (COMET's W4A4 and W4A8): in most blocks of inputs x8 is a 4-bit number times a whole number q
from 1 to 16, the same for all of the block. So these blocks have a dynamic scale of their own, and
sums stay integers over all blocks.
"""

import torch
from torch import Tensor

TOP = 127
TOP_4 = 7 * 16  # the largest x8 of a 4-bit block
MOST_Q = 16
# q is at least this part of the largest number of a 4-bit block, which may so be 8.5 steps of its
# own while 4 bits reach from -8 to 7. Output error of SmolLM2's linears by rounding alone, largest
# numbers of 7, 8, 8.5 and 9 steps: .0056, .0045, .0043, .0044; unrotated 7, 8, 9: .0096, .0079,
# .0078.
REACH = 2 / 17
PORTION = 2**11  # blocks at once on a CPU: temporaries that stay in L2


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., k) of any dtype -> int8 (..., k) and s, fp32 (..., 1)."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    top = torch.full_like(largest, TOP)  # torch would multiply by a number's reciprocal
    # The quotient is infinite for a < 4e-37, and 0 times it counts as 0; else no product is beyond
    # 127 by more than a rounding.
    steps = (x * (top / largest)).nan_to_num_(0.0, TOP, -TOP)
    return steps.round_().to(torch.int8), largest / top


def hadamard(z: Tensor) -> Tensor:
    """The last dimension, B numbers, a power of two, times the normalised Hadamard matrix of size
    B in Sylvester's order, which is its own inverse. Butterflies in a fixed order, so that every
    device gets the same bits; fp32."""
    size = z.shape[-1]
    factor = torch.full((), size**-0.5, dtype=torch.float32, device=z.device)
    portion = PORTION if z.device.type == "cpu" else max(1, z.numel() // size)
    pieces = [
        _butterflies(some.T.contiguous()).T * factor
        for some in torch.split(z.float().reshape(-1, size), portion)
    ]
    return torch.cat(pieces).view(z.shape)


def _butterflies(z: Tensor) -> Tensor:
    """Columns of (B, m), not normalised: a step reads and writes whole rows."""
    size, distance = len(z), 1
    while distance < size:
        a, b = z.view(size // (2 * distance), 2, distance, -1).unbind(1)
        z, distance = torch.stack([a + b, a - b], 1).view(z.shape), 2 * distance
    return z


def _blocks(z: Tensor, bits: Tensor) -> Tensor:  # (..., k) -> (..., k / B, B)
    return z.reshape(*z.shape[:-1], len(bits), z.shape[-1] // len(bits))


def rotated(z: Tensor, bits: Tensor) -> Tensor:
    """(..., k) -> fp32: 4-bit blocks times the Hadamard matrix, on either side of a product."""
    blocks = _blocks(z.float(), bits)
    few = (bits == 4)[:, None].expand(blocks.shape[-2:])
    return torch.where(few, hadamard(blocks), blocks).reshape(z.shape)


def rotated_by(matrix: Tensor, z: Tensor, bits: Tensor) -> Tensor:
    """As `rotated`, with the Hadamard matrix of a block as a factor: for training, which needs
    gradients and not the same bits on every device. Butterflies would keep each step for them."""
    blocks = _blocks(z.float(), bits)
    few = (bits == 4)[:, None].expand(blocks.shape[-2:])
    return torch.where(few, blocks @ matrix, blocks).reshape(z.shape)


def round_blocks(z: Tensor, bits: Tensor, rotation: bool) -> tuple[Tensor, Tensor]:
    """(..., k) of any dtype in stored order and uint8 (k / B), 4 or 8 for each block of B inputs ->
    int8 (..., k) and s, fp32 (..., 1)."""
    blocks = _blocks(rotated(z, bits) if rotation else z.float(), bits)
    few = (bits == 4)[:, None]
    largest = blocks.abs().amax(-1, keepdim=True)  # (..., k / B, 1)
    up = torch.full_like(largest, TOP / TOP_4)
    a = torch.where(few, largest * up, largest).amax(-2, keepdim=True)
    top = torch.full_like(a, TOP)
    inverse = top / a
    # As in round_tokens: where the quotient is infinite or no number, 0 times it counts as 0.
    least = (largest * inverse).mul_(torch.full_like(a, REACH)).ceil_()
    q = torch.where(few, least.nan_to_num_(1.0, MOST_Q, 1.0).clamp_(1, MOST_Q), 1.0)
    steps = (blocks * (inverse / q)).nan_to_num_(0.0, TOP, -TOP).round_()
    low, high = torch.where(few, -8.0, -TOP), torch.where(few, 7.0, TOP)
    x8 = torch.minimum(torch.maximum(steps, low), high).mul_(q)
    return x8.to(torch.int8).reshape(z.shape), (a / top)[..., 0]


def round_inputs(
    x: Tensor, order: Tensor | None, bits: Tensor | None, rotation: bool
) -> tuple[Tensor, Tensor]:
    """(..., k) as the model has it -> int8 (..., k) in stored order and s; no bits: a8."""
    if order is None or bits is None:
        return round_tokens(x)
    return round_blocks(x.index_select(-1, order.long()), bits, rotation)
