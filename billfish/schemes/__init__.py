"""The registry: a scheme is one folder here and one line below. Deleting both removes the scheme.

Planned peer, not yet written: w4a16_24 (2:4 sparse).
"""

from billfish.schemes.base import Family
from billfish.schemes.w4a16 import FAMILY as w4a16
from billfish.schemes.w4ax import FAMILY as w4ax
from billfish.schemes.w2416 import FAMILY as w2416

SCHEMES: dict[str, Family] = {family.scheme.name: family for family in (w4a16, w2416, w4ax)}
DEFAULT = w4a16.scheme.name
