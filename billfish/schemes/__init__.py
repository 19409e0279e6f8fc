"""The registry: one line a scheme, one folder a scheme. Deleting both removes it and breaks nothing
else.

Planned peers, not yet written: w4a16_24 (2:4 sparse), w2416 (2/4/16 bit in one matrix), w4ax
(W4A4/W4A8).
"""

from billfish.schemes.base import Scheme
from billfish.schemes.w4a16 import W4A16

SCHEMES: dict[str, type[Scheme]] = {
    W4A16.name: W4A16,
}
