"""What a job that streams asks of the system: files are written while it goes on, and memory that
is free is given back.
"""

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

M_MMAP_THRESHOLD = -3  # malloc.h
REST = (
    5.0  # times the longest write between two large ones: a job spends little of its time on them
)


class Writes:
    """One after the other, behind the back of whoever asks; who asks next is told of a failure.

    `at_once`: in the asker's own time. On a CPU a second thread takes a core from the solver, and
    what is written would be in memory beside what comes next.
    """

    def __init__(self, at_once: bool) -> None:
        self._at_once, self._pool = at_once, ThreadPoolExecutor(1, "writes")
        self._given: list[Future[None]] = []
        self._longest, self._next = 0.0, 0.0

    def __call__(self, write: Callable[[], None]) -> None:
        if self._at_once:
            write()
        else:
            self._given = [future for future in self._given if not _ended(future)]
            self._given.append(self._pool.submit(self._timed, write))

    def _timed(self, write: Callable[[], None]) -> None:
        started = time.monotonic()
        write()
        self._longest = max(self._longest, time.monotonic() - started)
        self._next = time.monotonic() + REST * self._longest

    @property
    def may_be_large(self) -> bool:
        """Whether what could also be written later should be written now. A GPU solves a block of
        SmolLM2 in a third of the time its activations take to a disk."""
        idle = all(future.done() for future in self._given)
        return self._at_once or (idle and time.monotonic() >= self._next)

    def __enter__(self) -> "Writes":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown()  # what was given is written, whatever made us leave
        if kind is None:
            for future in self._given:
                future.result()


def _ended(future: Future[None]) -> bool:
    """Raises what it raised."""
    if future.done():
        future.result()
    return future.done()


def return_freed_memory() -> None:
    """Give freed tensors back to the system: glibc keeps the holes between blocks that come and go.
    What passes need again and again stays below the threshold; mapping it anew each time costs a
    third of a pass."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**23)
        libc.malloc_trim(0)
