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


def one_each(cases, values):
    """Pairs of all cases with all values: each case with one of them, in turn, the others thorough.
    Cases of several arguments are tuples."""
    pairs = []
    for place, case in enumerate(cases):
        for turn, value in enumerate(values):
            pair = (*case, value) if isinstance(case, tuple) else (case, value)
            pairs.append(pair if turn == place % len(values) else also(*pair))
    return pairs


def second(programs, step=2):
    """Every second instance of each kernel, or with step 1 all of them."""
    kernels = {}
    for program in programs:
        kernels.setdefault(program.name.partition("<")[0], []).append(program)
    return [program for instances in kernels.values() for program in instances[::step]]


def also(*values):
    """A thorough case of several arguments."""
    return pytest.param(*values, marks=thorough)
