"""Cases that repeat a path which another one covers, in other shapes, types and architectures.
`make test` leaves them out, `make test-thorough` runs them, too."""

import pytest

thorough = pytest.mark.thorough


def some(cases, *kept):
    """All of the cases; those whose places are not among the kept are thorough."""
    cases = list(cases)
    assert kept and set(kept) <= set(range(len(cases))), kept
    return [
        case if place in kept else pytest.param(case, marks=thorough)
        for place, case in enumerate(cases)
    ]


def every_third(cases):
    return some(cases, *range(0, len(cases), 3))


def also(*values):
    """A thorough case of several arguments."""
    return pytest.param(*values, marks=thorough)
