"""What of a model is quantized: fits a scheme to it, warns or refuses where it leaves linears in 16
bits, and warns of weights that no one would read."""

from collections.abc import Sequence

from billfish.checkpoints.read import Checkpoint
from billfish.errors import UserError
from billfish.schemes.base import Fitting, Scheme, Shape

TOLERATED = 0.05  # share of the blocks' weights that may stay in 16 bits


def fit_scheme(
    wanted: Scheme | Fitting, shapes: Sequence[Shape], allow_skipped: bool
) -> tuple[Scheme, str | None]:
    """The scheme for linears of these shapes, and a warning if it cannot quantize all of them.
    Raises if parameters that the user chose leave more than TOLERATED of the weights in 16 bits and
    `allow_skipped` is not set."""
    scheme = wanted.fit(shapes) if isinstance(wanted, Fitting) else wanted
    left = sum(n * k for n, k in shapes if scheme.refuses(n, k))
    share = left / max(1, sum(n * k for n, k in shapes))
    if not share:
        return scheme, None
    what, way_out = scheme.misfit(shapes)
    told = f"{what}: {share:.1%} of the weights that could be quantized stay in 16 bits. {way_out}"
    if scheme is wanted and share > TOLERATED and not allow_skipped:
        raise UserError(f"{told}, or leave them so with --allow-skipped.")
    return scheme, told + "."


def unread_files(source: Checkpoint) -> str | None:
    """A warning if there are files of weights beside the checkpoint's that are not part of it."""
    read = {entry.file for entry in source.entries.values()}
    others = sorted({path.name for path in source.path.glob("*.safetensors")} - read)
    if not others:
        return None
    return (
        f"{source.path}: {', '.join(others)}: is no part of the checkpoint (its index does not say "
        "so), and neither read nor copied. Copy it yourself if the model needs it."
    )
