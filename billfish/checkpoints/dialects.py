"""Finds the dialect of a quantization_config, and the dialect in which a scheme is written."""

from collections.abc import Iterable

from billfish.checkpoints.own import Own
from billfish.errors import UserError
from billfish.schemes import SCHEMES
from billfish.schemes.base import Scheme
from billfish.schemes.dialect import Config, Dialect, method_of


def dialects() -> dict[str, type[Dialect]]:
    """Name -> dialect, of all schemes, and Billfish's own."""
    found: list[type[Dialect]] = [each for family in SCHEMES.values() for each in family.dialects]
    found.append(Own)
    return {dialect.name: dialect for dialect in found}


def read_dialect(config: Config) -> Dialect:
    """The dialect of a quantization_config; raises a UserError if it is not supported."""
    known = dialects().values()
    for dialect in known:
        if dialect.claims(config):
            return dialect.read(config)
    raise UserError(
        f"quantization_config: quant_method {method_of(config)!r} cannot be read. "
        f"Supported are {', '.join(dialect.known_as for dialect in known)}."
    )


def dialect_of(schemes: Iterable[Scheme]) -> type[Dialect]:
    """The dialect that we write: a public one if it holds all these schemes, else our own."""
    written = {next(iter(SCHEMES[scheme.name].dialects), Own) for scheme in schemes}
    return written.pop() if len(written) == 1 else Own
