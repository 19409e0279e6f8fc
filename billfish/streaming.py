"""What a job that streams asks of the system: files are written while it goes on, and memory that
is free is given back.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

M_MMAP_THRESHOLD = -3  # malloc.h


class Writes:
    """One after the other, each behind the back of whoever asked; the next one to ask waits for it
    and is told if it failed.

    `at_once`: in the asker's own time. On a CPU a second thread takes a core from the solver, and
    what is written would be in memory beside what comes next.
    """

    def __init__(self, at_once: bool) -> None:
        self._at_once, self._pool = at_once, ThreadPoolExecutor(1, "writes")
        self._last: Future[None] | None = None

    def __call__(self, write: Callable[[], None]) -> None:
        self.wait()
        if self._at_once:
            write()
        else:
            self._last = self._pool.submit(write)

    def wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def __enter__(self) -> "Writes":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown()  # what has begun is finished, whatever made us leave
        if kind is None:
            self.wait()


def return_freed_memory() -> None:
    """Give freed tensors back to the system: glibc keeps the holes between blocks that come and go.
    What passes need again and again stays below the threshold; mapping it anew each time costs a
    third of a pass."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**24)
        libc.malloc_trim(0)
