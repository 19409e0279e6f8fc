"""Which linears of a model a scheme takes, and what is said where it leaves some in 16 bits."""

from collections.abc import Sequence

from billfish.errors import UserError
from billfish.schemes.base import Fitting, Scheme, Shape

TOLERATED = 0.05  # of the weights in the blocks, left in 16 bits


def settle(
    wanted: Scheme | Fitting, shapes: Sequence[Shape], allow_skipped: bool
) -> tuple[Scheme, str | None]:
    """The scheme, and what must be said of linears that it does not take. One that was chosen, and
    leaves more than a little of a model as it is, is refused, unless that is asked for."""
    scheme = wanted.fit(shapes) if isinstance(wanted, Fitting) else wanted
    left = sum(n * k for n, k in shapes if scheme.refuses(n, k))
    share = left / max(1, sum(n * k for n, k in shapes))
    if not share:
        return scheme, None
    what, way_out = scheme.misfit(shapes)
    told = f"{what}: {share:.1%} of the weights that could be quantized stay in 16 bits. {way_out}"
    if scheme is wanted and share > TOLERATED and not allow_skipped:
        raise UserError(f"{told}; choose one, or auto, or leave them so with --allow-skipped.")
    return scheme, told + "."
