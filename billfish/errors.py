"""The two exceptions a caller of Billfish is meant to see.

A UserError's text is complete: where, what was given, the rule, the way out. The command line
prints it as it is, without a traceback, and exits with 1.
"""


class UserError(ValueError):
    """The input cannot be used; the message says why and what to do."""

    def __init__(self, message: str, part: str | None = None) -> None:
        """`part`: which tensor of a layer, or which parameter of a request, the error is about."""
        super().__init__(message)
        self.part = part


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not an Exception, so that no library on the way mistakes it for one."""
