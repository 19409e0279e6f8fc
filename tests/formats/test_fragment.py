"""fragment.py against the lane-by-lane model of the instruction."""

import random

import pytest
from ptx_model import ldmatrix, mma_m16n8k16

from billfish.formats import fragment
from billfish.formats.fragment import a_fragment, b_fragment, c_fragment


def load(matrix, where, elements):
    """Matrix -> registers, as a kernel that trusts `where` would load them."""
    return [[at(matrix, where(lane, i)) for i in range(elements)] for lane in range(fragment.LANES)]


def at(matrix, place):
    return matrix[place[0]][place[1]]


def draw(rows, columns, source):
    return [[source.randint(-9, 9) for _ in range(columns)] for _ in range(rows)]


@pytest.mark.parametrize("seed", range(3))
def test_mma_of_fragments_is_the_matrix_product(seed):
    source = random.Random(seed)
    a, b, c = draw(16, 16, source), draw(16, 8, source), draw(16, 8, source)
    d = mma_m16n8k16(load(a, a_fragment, 8), load(b, b_fragment, 4), load(c, c_fragment, 4))
    for lane in range(32):
        for element in range(4):
            row, col = c_fragment(lane, element)
            expected = c[row][col] + sum(a[row][k] * b[k][col] for k in range(16))
            assert d[lane][element] == expected, (lane, element)


def test_a_is_what_ldmatrix_x4_loads():
    a = [[16 * row + col for col in range(16)] for row in range(16)]
    quarters = [
        [row[left : left + 8] for row in a[top : top + 8]] for left in (0, 8) for top in (0, 8)
    ]
    assert load(a, a_fragment, 8) == ldmatrix(quarters)


def test_b_is_what_ldmatrix_x2_loads_of_the_transposed_matrix():
    b = [[8 * row + col for col in range(8)] for row in range(16)]
    transposed = [[b[k][n] for k in range(16)] for n in range(8)]
    halves = [[row[left : left + 8] for row in transposed] for left in (0, 8)]
    assert load(b, b_fragment, 4) == ldmatrix(halves)


@pytest.mark.parametrize(
    ("where", "elements", "rows", "columns"),
    [(a_fragment, 8, 16, 16), (b_fragment, 4, 16, 8), (c_fragment, 4, 16, 8)],
)
def test_every_element_has_one_owner(where, elements, rows, columns):
    places = [where(lane, element) for lane in range(32) for element in range(elements)]
    assert sorted(places) == [(row, col) for row in range(rows) for col in range(columns)]
