"""The group size (weights along k that share a scale): which sizes fit a model's linears."""

from collections.abc import Sequence

SIZES = (128, 64, 32)  # candidates of `best`; larger groups need fewer scales
USUAL = (16, *SIZES[::-1], 256, 512)

Shape = tuple[int, int]  # n, k


def best(shapes: Sequence[Shape]) -> int:
    """The largest size that leaves the fewest weights in 16 bits."""
    return min(SIZES, key=lambda size: (weights_left(shapes, size), -size))


def misfit(size: int, shapes: Sequence[Shape]) -> tuple[str, str]:
    """Sentences: which k the size does not divide, and which sizes divide all."""
    odd = sorted({k for _, k in shapes if not divides(size, k)})
    fits = [each for each in USUAL if not weights_left(shapes, each)]
    return (
        f"group size {size} does not divide k = {', '.join(map(str, odd))}",
        f"Sizes that divide every k: {', '.join(map(str, [*fits, -1]))} (-1: one scale a row); "
        "choose one, or auto",
    )


def weights_left(shapes: Sequence[Shape], size: int) -> int:
    """Number of weights in linears whose k is not divisible by `size`."""
    return sum(n * k for n, k in shapes if not divides(size, k))


def divides(size: int, k: int) -> bool:
    return size == -1 or k % size == 0
