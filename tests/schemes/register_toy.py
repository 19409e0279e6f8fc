"""A pytest plugin that adds the toy scheme to the registry before tests are collected."""

from toy import FAMILY

from billfish.schemes import SCHEMES

SCHEMES[FAMILY.scheme.name] = FAMILY
