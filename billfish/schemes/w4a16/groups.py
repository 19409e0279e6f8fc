"""How many weights along k share a scale: which sizes fit a model's linears."""

from collections.abc import Sequence

SIZES = (128, 64, 32)  # from which one is taken; fewer scales are fewer bytes
USUAL = (16, *SIZES[::-1], 256, 512)

Shape = tuple[int, int]  # n, k


def best(shapes: Sequence[Shape]) -> int:
    """The largest size that leaves the fewest weights in 16 bits."""
    return min(SIZES, key=lambda size: (weights_left(shapes, size), -size))


def misfit(size: int, shapes: Sequence[Shape]) -> tuple[str, str]:
    """What does not fit, and the sizes that would."""
    odd = sorted({k for _, k in shapes if not divides(size, k)})
    fits = [each for each in USUAL if not weights_left(shapes, each)]
    return (
        f"group size {size} does not divide k = {', '.join(map(str, odd))}",
        f"Sizes that divide every k: {', '.join(map(str, [*fits, -1]))} (-1: one scale a row)",
    )


def weights_left(shapes: Sequence[Shape], size: int) -> int:
    """Those in linears that `size` does not fit."""
    return sum(n * k for n, k in shapes if not divides(size, k))


def divides(size: int, k: int) -> bool:
    return size == -1 or k % size == 0
