"""How a product is cut up on a GPU: a pure function of sizes, so that it is tested without one."""

from dataclasses import dataclass

MOST_TOKENS = 16  # of one launch: two columns of tensor-core tiles
MOST_STAGES = 8  # barriers that decode.cuh has room for
BARRIER_BYTES = 256
ROW_BYTES = 256  # of 128 activations
RESERVED = 1024  # shared memory that each block costs beyond what it asks for


@dataclass(frozen=True)
class Tile:
    """One launch of w4a16_decode."""

    tokens: int  # 8 or 16: columns of the instance
    bands: int  # of 64 outputs: 2 or 4
    cluster: int  # blocks that share a tile's inputs
    blocks: int
    stages: int
    smem: int


def pick_tile(
    m: int, n: int, k_tiles: int, record_bytes: int, sms: int, smem_per_sm: int,
    bands: int | None = None, cluster: int | None = None,
) -> Tile:  # fmt: skip
    tokens = 8 if m <= 8 else 16
    cluster = cluster or 2
    clusters = sms // cluster
    share = -(-(-(-n // 64)) // clusters)  # bands of a cluster
    bands = bands or (share if share < 3 else 4)
    slices = 2 if bands == 1 else 1
    sums = 1024 * tokens * (2 if share > bands else 1)
    stage = slices * (bands * record_bytes + tokens * ROW_BYTES)
    # Half of an SM: the next kernel's blocks start beside these (PDL) and fetch their weights.
    room = smem_per_sm // 2 - RESERVED - BARRIER_BYTES - sums
    stages = min(MOST_STAGES, room // stage)
    return Tile(
        tokens, bands, cluster, clusters * cluster, stages, BARRIER_BYTES + stages * stage + sums
    )
