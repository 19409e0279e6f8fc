"""Ctrl-C and SIGTERM: both raise Interrupted, and end a command with the code that README names.

A second one ends it at once, whatever the first is still waiting for: nothing that is under its
final name on disk is ever half written.
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
    """Otherwise what shells say of a command that a signal ended: 130 and 143."""
    return GOES_ON if goes_on() else 128 + signum


def ended(stopped: Interrupted) -> int:
    """Says it, without a library that may not be imported yet; the exit code."""
    told = "Finished blocks are on disk; the same command goes on from there." if goes_on() else ""
    print(f"error: interrupted. {told}".rstrip(), file=sys.stderr)
    return code(*stopped.args)
