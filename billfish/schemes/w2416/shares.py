"""How many groups of a w2416 layer have 4 bits, and how many outliers it keeps: what a budget of
true bits allows.

All inputs of a layer are cut into parts of equal size. Every part has the same number of 4-bit
groups and every band of a part the same number of outliers, so that a shard of a layer (tensor
parallelism) is a layer of the same scheme, and kernels that split k have equal work.
"""

import math
from dataclasses import dataclass

GROUP = 16  # inputs with the same number of bits
BAND = 16  # outputs that share second-order scales and a list of outliers
PART = 512  # inputs of a part, at least, if the layer has as many
PLACES = 2**16  # of an outlier in its band and part: 16 bits

# Bits of a band's group of 2-bit weights: codes, scales of the groups in 4 bits, their zeros in 2,
# and their second-order scale and offset together in 16.
TWO = BAND * (GROUP * 2 + 4 + 2) + 16  # 2.4375 a weight
FOUR = BAND * GROUP * 4
SCALE_4 = BAND * 16  # a part's: one 16-bit scale for a row's 4-bit weights
OUTLIER = 16 + 16  # place and value
MAP = 8 / (GROUP * 128)  # a weight's share of input_bits, in a layer of 128 outputs


def part_size(k: int) -> int:
    """Inputs of a part: k, halved while that leaves whole groups and at least PART inputs."""
    size = k
    while size >= 2 * PART and size % (2 * GROUP) == 0:
        size //= 2
    return size


@dataclass(frozen=True)
class Shares:
    """Of each part of a layer."""

    parts: int
    two: int  # groups with 2 bits
    four: int  # groups with 4 bits
    outliers: int  # of each band

    @property
    def part(self) -> int:
        return GROUP * (self.two + self.four)


def shares(k: int, budget: float, outliers: float) -> Shares | None:
    """The most 4-bit groups that `budget` bits a weight allow beside a share of at least `outliers`
    of all weights; what is then left goes to outliers. None if all groups in 2 bits are too
    many."""
    part = part_size(k)
    if not part:
        return Shares(0, 0, 0, 0)
    groups = part // GROUP
    left = math.floor((budget - MAP) * BAND * part) - groups * TWO - SCALE_4
    if left < 0:
        return None
    wanted = math.ceil(outliers * BAND * part)
    four = max(0, min(groups - 1, (left - wanted * OUTLIER) // (FOUR - TWO)))
    return Shares(k // part, groups - four, four, (left - four * (FOUR - TWO)) // OUTLIER)
