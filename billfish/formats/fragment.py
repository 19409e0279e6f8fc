"""PTX mma.m16n8k16 fragments: which matrix element a lane holds in which register half.

D (16, 8) = A (16, 16) B (16, 8) + C (16, 8), spread over a warp of 32 lanes. Element i of a lane
is half i % 2 of its 32-bit register i // 2 (A: 4 registers, B: 2); in C and D, register i (fp32).

    lane = 4 * quad + pair      a lane owns two neighbours, a quad of lanes owns a row of eight

PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
"""

LANES = 32
M, N, K = 16, 8, 16
A_ELEMENTS, B_ELEMENTS, C_ELEMENTS = 8, 4, 4

assert LANES * A_ELEMENTS == M * K
assert LANES * B_ELEMENTS == K * N
assert LANES * C_ELEMENTS == M * N


def a_fragment(lane: int, element: int) -> tuple[int, int]:
    """(row of m, column of k). Elements 2, 3, 6, 7: 8 rows down; 4 to 7: 8 columns right."""
    quad, pair = divmod(lane, 4)
    row = quad + 8 * (element // 2 % 2)
    return row, 2 * pair + element % 2 + 8 * (element // 4)


def b_fragment(lane: int, element: int) -> tuple[int, int]:
    """(row of k, column of n). A quad owns one column; elements 2 and 3 are eight rows down."""
    quad, pair = divmod(lane, 4)
    return 2 * pair + element % 2 + 8 * (element // 2), quad


def c_fragment(lane: int, element: int) -> tuple[int, int]:
    """(row of m, column of n), for C and D alike. Elements 2 and 3 are eight rows down."""
    quad, pair = divmod(lane, 4)
    return quad + 8 * (element // 2), 2 * pair + element % 2
