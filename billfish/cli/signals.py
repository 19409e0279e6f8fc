"""Ctrl-C and SIGTERM: both raise Interrupted, and end a command with the code that README names.

A second one ends the process at once. Files get their final names only when they are complete, so
that leaves none half written.
"""

import os
import signal
import sys
from types import FrameType

from billfish.errors import Interrupted

GOES_ON = 75  # EX_TEMPFAIL: the same command goes on
RESUMABLE = ("quantize",)


def catch() -> None:
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)


def _stop(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    raise Interrupted(signum)


def _end(signum: int, frame: FrameType | None) -> None:
    os._exit(code(signum))


def goes_on() -> bool:
    return sys.argv[1:2] in ([name] for name in RESUMABLE)


def code(signum: int) -> int:
    """75 if the command can be resumed; else, as in a shell, 130 and 143."""
    return GOES_ON if goes_on() else 128 + signum


def ended(stopped: Interrupted) -> int:
    """Prints the message without rich, which may not be imported yet; gives the exit code."""
    told = "Finished blocks are on disk; the same command goes on from there." if goes_on() else ""
    print(f"error: interrupted. {told}".rstrip(), file=sys.stderr)
    return code(*stopped.args)
