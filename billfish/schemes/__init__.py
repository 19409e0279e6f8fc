"""The registry: a scheme is one folder here and one line below; deleting both removes it."""

from billfish.schemes.base import Family
from billfish.schemes.w4a16 import FAMILY as w4a16
from billfish.schemes.w4a16_24 import FAMILY as w4a16_24
from billfish.schemes.w4ax import FAMILY as w4ax
from billfish.schemes.w2416 import FAMILY as w2416

SCHEMES: dict[str, Family] = {
    family.scheme.name: family for family in (w4a16, w2416, w4ax, w4a16_24)
}
DEFAULT = w4a16.scheme.name
