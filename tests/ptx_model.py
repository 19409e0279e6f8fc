"""mma.m16n8k16 and ldmatrix emulated lane by lane: the independent judge of formats/fragment.py.

Written from the PTX ISA's figures in the other direction, element -> (lane, register), with plain
loops. Imports nothing of Billfish, so that it cannot agree with it by accident.
"""

Registers = list[list[int]]  # [lane][element]


def owner_of_a(row: int, col: int) -> tuple[int, int]:
    """(lane, element) that holds A[row][col]: four 8 x 8 quarters, down first."""
    quarter = {(0, 0): 0, (1, 0): 2, (0, 1): 4, (1, 1): 6}[row // 8, col // 8]
    return (row % 8) * 4 + (col % 8) // 2, quarter + col % 2


def owner_of_b(row: int, col: int) -> tuple[int, int]:
    """(lane, element) that holds B[row][col]: two 8 x 8 halves, one below the other."""
    return col * 4 + (row % 8) // 2, (row // 8) * 2 + row % 2


def owner_of_c(row: int, col: int) -> tuple[int, int]:
    return (row % 8) * 4 + col // 2, (row // 8) * 2 + col % 2


def mma_m16n8k16(a: Registers, b: Registers, c: Registers) -> Registers:
    """D = A B + C, each lane holding 8 elements of A and 4 of B, C and D."""
    d = [[0] * 4 for _ in range(32)]
    for row in range(16):
        for col in range(8):
            lane, element = owner_of_c(row, col)
            total = c[lane][element]
            for k in range(16):
                a_lane, a_element = owner_of_a(row, k)
                b_lane, b_element = owner_of_b(k, col)
                total += a[a_lane][a_element] * b[b_lane][b_element]
            d[lane][element] = total
    return d


def ldmatrix(matrices: list[list[list[int]]]) -> Registers:
    """ldmatrix.x1 to .x4: of each 8 x 8 matrix lane l gets row l // 4, columns 2 (l % 4), + 1."""
    return [
        [matrix[lane // 4][2 * (lane % 4) + half] for matrix in matrices for half in (0, 1)]
        for lane in range(32)
    ]
