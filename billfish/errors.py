"""The two exceptions a caller of Billfish is meant to see.

A UserError's text is complete: where, what was given, the rule, the way out. The command line
prints it as it is, without a traceback, and exits with 1.
"""


class UserError(ValueError):
    """The input cannot be used; the message says why and what to do."""


class Interrupted(Exception):
    """The job was stopped at a point from which the same command continues (exit code 75)."""
