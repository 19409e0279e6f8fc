"""BackgroundWriter: writes in order, reports failures, and pauses between large writes."""

import threading
import time

import pytest

from billfish.offline.streaming import BackgroundWriter


@pytest.mark.parametrize("synchronous", [True, False])
def test_all_is_written_in_order(synchronous):
    done = []
    with BackgroundWriter(synchronous) as writes:
        for i in range(20):
            writes(lambda i=i: done.append((i, threading.current_thread())))
    assert [i for i, _ in done] == list(range(20))
    assert all((thread is threading.current_thread()) == synchronous for _, thread in done)


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_is_told_and_ends_it(synchronous, error):
    done = []

    def fail():
        raise error

    with pytest.raises(type(error)), BackgroundWriter(synchronous) as writes:
        writes(fail)
        for i in range(3):
            time.sleep(0.05)
            writes(lambda i=i: done.append(i))
    assert done == []


def test_what_was_given_is_written_when_the_job_stops():
    begun, done = threading.Event(), []

    def write():
        begun.set()
        time.sleep(0.2)
        done.append("first")

    with pytest.raises(KeyboardInterrupt), BackgroundWriter(synchronous=False) as writes:
        writes(write)
        begun.wait(10)
        writes(lambda: done.append("second"))
        raise KeyboardInterrupt
    assert done == ["first", "second"]


def test_large_writes_leave_time_to_the_job():
    with BackgroundWriter(synchronous=False) as writes:
        assert writes.accepts_large
        writes(lambda: time.sleep(0.1))
        assert not writes.accepts_large  # it is busy
        time.sleep(0.2)
        assert not writes.accepts_large  # it was busy for 0.1 s
        time.sleep(0.5)
        assert writes.accepts_large
    assert BackgroundWriter(synchronous=True).accepts_large
