"""Which dialect a quantization_config is written in, and which one a scheme is written in."""

from billfish.checkpoints.own import Own
from billfish.errors import UserError
from billfish.schemes import SCHEMES
from billfish.schemes.base import Scheme
from billfish.schemes.dialect import Config, Dialect, method_of


def dialects() -> dict[str, type[Dialect]]:
    """By name: those of all schemes, and our own."""
    found: list[type[Dialect]] = [each for family in SCHEMES.values() for each in family.dialects]
    found.append(Own)
    return {dialect.name: dialect for dialect in found}


def read_dialect(config: Config) -> Dialect:
    """The dialect of a checkpoint; raises a UserError that names what cannot be read."""
    known = dialects().values()
    for dialect in known:
        if dialect.claims(config):
            return dialect.read(config)
    raise UserError(
        f"quantization_config: quant_method {method_of(config)!r} cannot be read. "
        f"Supported are {', '.join(dialect.known_as for dialect in known)}."
    )


def dialect_of(scheme: Scheme) -> type[Dialect]:
    """That which we write: a public one if it can say the scheme, else our own."""
    return next(iter(SCHEMES[scheme.name].dialects), Own)
