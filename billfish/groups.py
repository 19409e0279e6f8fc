"""How many weights along k share a scale: the size that fits a model, where none is chosen.

A linear whose k is not a whole number of groups stays in 16 bits. A size that would leave more
than a little of a model so is refused, unless that is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from billfish.errors import UserError
from billfish.schemes.w4a16 import W4A16

SIZES = (128, 64, 32)  # from which one is taken; fewer scales are fewer bytes
USUAL = (16, *SIZES[::-1], 256, 512)
TOLERATED = 0.05  # of the weights in the blocks, left in 16 bits

Shape = tuple[int, int]  # n, k


@dataclass(frozen=True)
class Fitted:
    """A scheme whose group size follows from the linears: the largest that leaves the fewest
    weights in 16 bits, none as a rule."""

    bits: int = 4
    symmetric: bool = True

    def scheme(self, shapes: Sequence[Shape]) -> W4A16:
        size = min(SIZES, key=lambda size: (share_left(shapes, size), -size))
        return W4A16(self.bits, size, self.symmetric)


AUTO = Fitted()


def settle(
    wanted: W4A16 | Fitted, shapes: Sequence[Shape], allow_skipped: bool
) -> tuple[W4A16, str | None]:
    """The scheme, and what must be said of its group size."""
    scheme = wanted if isinstance(wanted, W4A16) else wanted.scheme(shapes)
    size, share = scheme.group_size, share_left(shapes, scheme.group_size)
    if not share:
        return scheme, None
    odd = sorted({k for _, k in shapes if not divides(size, k)})
    fits = [each for each in USUAL if not share_left(shapes, each)]
    told = (
        f"group size {size} does not divide k = {', '.join(map(str, odd))}: {share:.1%} of the "
        "weights that could be quantized stay in 16 bits. Sizes that divide every k: "
        f"{', '.join(map(str, [*fits, -1]))} (-1: one scale a row)"
    )
    if scheme is wanted and share > TOLERATED and not allow_skipped:
        raise UserError(f"{told}; choose one, or auto, or leave them so with --allow-skipped.")
    return scheme, told + "."


def share_left(shapes: Sequence[Shape], size: int) -> float:
    """Of all weights, those in linears that `size` does not fit."""
    left = sum(n * k for n, k in shapes if not divides(size, k))
    return left / max(1, sum(n * k for n, k in shapes))


def why_left(size: int, k: int) -> str | None:
    """The reason for which a linear stays as it is, or None."""
    return None if divides(size, k) else f"group size {size} does not divide k = {k}"


def divides(size: int, k: int) -> bool:
    return size == -1 or k % size == 0
