"""System services of a streaming job: files are written by a thread of their own, and freed memory
goes back to the system.
"""

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

M_MMAP_THRESHOLD = -3  # malloc.h
# Pause after a write, as a multiple of the longest write, before a large one: so that writing takes
# a small share of a job's time.
REST = 5.0


class BackgroundWriter:
    """Runs writes one after the other in a thread; a failure is raised by the next call or at exit.

    `synchronous`: each call writes before it returns. For jobs on a CPU, where a second thread
    would take a core from the solver, and pending tensors memory from the next block.
    """

    def __init__(self, synchronous: bool) -> None:
        self._synchronous, self._pool = synchronous, ThreadPoolExecutor(1, "writes")
        self._given: list[Future[None]] = []
        self._longest, self._next = 0.0, 0.0

    def __call__(self, write: Callable[[], None]) -> None:
        if self._synchronous:
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
    def accepts_large(self) -> bool:
        """Whether activations, which need not be saved after every block, should be saved now. A
        GPU quantizes a block of SmolLM2 in a third of the time that saving its activations
        takes."""
        idle = all(future.done() for future in self._given)
        return self._synchronous or (idle and time.monotonic() >= self._next)

    def __enter__(self) -> "BackgroundWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown()  # pending writes finish even after an exception
        if kind is None:
            for future in self._given:
                future.result()


def _ended(future: Future[None]) -> bool:
    """Whether it is done; raises its exception if it failed."""
    if future.done():
        future.result()
    return future.done()


def return_freed_memory() -> None:
    """Return freed heap memory to the system: glibc keeps the holes that streamed blocks leave.

    Tensors of 8 MB and more are mapped and unmapped one by one. Smaller ones, which every pass
    allocates again, stay on the heap: mapping them each time costs a third of a pass."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**23)
        libc.malloc_trim(0)
