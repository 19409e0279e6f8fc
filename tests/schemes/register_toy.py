"""A plugin for pytest: the registry with the toy scheme in it, before any test is collected."""

from toy import FAMILY

from billfish.schemes import SCHEMES

SCHEMES[FAMILY.scheme.name] = FAMILY
