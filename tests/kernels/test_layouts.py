"""Every size and constant of the kernels that Python mirrors equals the header's own.

NVRTC compiles a text that includes the header and asserts the Python numbers (static_assert).
test_stripe.py does the same for the stages of w4a16_stripe.
"""

import itertools
import math
from pathlib import Path

import pytest
import torch

import billfish
from billfish.bench import timing
from billfish.engine.cuda import chunks, fused, pool, tables
from billfish.engine.kv import codes
from billfish.engine.sampling import RULE
from billfish.formats.layout import BRICK_K, BRICK_N
from billfish.kernels import clusters, jit, norm, routing, stripes, tensor_map, tiles
from billfish.kernels import striped as striped_sizes
from billfish.kernels.device import Gpu
from billfish.schemes.w4a16.cuda import batch, experts_tile, plan, tile
from billfish.schemes.w4a16.cuda.instances import KINDS
from billfish.schemes.w4a16_24.cuda import arrange as sparse_arrange
from billfish.schemes.w4a16_24.cuda import plan as sparse_plan
from billfish.schemes.w4a16_24.cuda import stripe_plan as sparse_stripe_plan
from billfish.schemes.w4a16_24.cuda import tile as sparse_tile
from billfish.schemes.w4ax.cuda import arrange as ax_arrange
from billfish.schemes.w4ax.cuda import rounding as ax
from billfish.schemes.w4ax.cuda import stripe as ax_stripe
from billfish.schemes.w2416.cuda import arrange as mixed_arrange
from billfish.schemes.w2416.cuda import batch as mixed_batches
from billfish.schemes.w2416.cuda import outliers
from billfish.schemes.w2416.cuda import plan as mixed_plan
from billfish.schemes.w2416.cuda import tile as mixed_tile

PACKAGE = Path(billfish.__file__).parent
ENGINE = PACKAGE / "engine" / "cuda"
W4A16, W2416, W4AX, SPARSE = (
    PACKAGE / "schemes" / name / "cuda" for name in ("w4a16", "w2416", "w4ax", "w4a16_24")
)
H200 = Gpu(0, "H200", "sm_90a", 132, 232448, 233472, 2**26)
CHUNK = ("sequence", "table", "token", "pages", "number", "chunks", "begin", "length")
DRAW_RULE = ("heat", "deepest", "top_k", "top_p", "low", "high")  # what Chooser.rule fills


def struct(name, fields, numbers):
    """A struct of `numbers` 32-bit fields, of which these are the first."""
    yield f"sizeof({name})", 4 * numbers
    for i, field in enumerate(fields):
        yield f"__builtin_offsetof({name}, {field})", 4 * i


def attention():
    yield from struct("Chunk", CHUNK, tables.ROW)
    yield "kAttendBytes", tables.MOST_SMEM
    yield "(kTakers + 1) * 32", tables.THREADS
    yield "kPageTokens", tables.PAGE
    yield "kPageTokens", pool.PAGE_TOKENS
    for kv, head_dim in itertools.product(pool.POOLS, tables.HEAD_DIMS):
        kind = f"{kv.capitalize()}, {head_dim}"
        block = f"AttendBlock<{kind}>"
        yield f"{kv.capitalize()}::kStageTokens", tables.STAGE_TOKENS[kv]
        yield f"PageRecord<{kind}>::kBytes", pool.POOLS[kv].record_bytes(head_dim)
        yield f"{block}::kBlocks", chunks.BLOCKS[kv]
        yield "kMostHeads", tables.MOST_GROUP
        yield f"{block}::kNewest", 2 * head_dim * tables.MOST_GROUP
        # The barriers lie last: full and empty of each stage, and four of items.
        barriers = f"8 * (2 * {block}::kStages + 4)"
        yield f"{block}::kBarriers + {barriers}", tables.shared_bytes(kv, head_dim)
        yield f"ChunkParts<{head_dim}>::kFloats", tables.part_floats(head_dim)


def draw():
    yield from struct("Rule", DRAW_RULE, RULE)
    yield "kDrawThreads", fused.DRAW_THREADS


def small():
    yield "kNormThreads", norm.THREADS
    yield "NormRow<Half>::kChunks", norm.CHUNKS
    yield "kSwigluThreads", fused.SWIGLU_THREADS


def store():
    yield "kMostGroup", fused.ROTATED_GROUP
    yield "kTogether", fused.TOGETHER
    yield "kBlocks", codes.BLOCKS
    yield "kGatherSlots", fused.GATHER_SLOTS


def records():
    """(group, asymmetric) -> bytes."""
    sizes = {(kind.group, int(kind.zeros)): kind.record_bytes for kind in KINDS}
    assert len(sizes) == 6
    return sizes.items()


def decode():
    yield "kRecordN", BRICK_N
    yield "kRecordK", BRICK_K
    yield "kCluster", clusters.CLUSTER
    yield "kBarrierBytes", clusters.TEAM_BARRIER_BYTES
    for bands in (1, 2, 4):
        yield f"decode_threads({bands})", tile.threads(bands)
    for ((group, zeros), size), m, share in itertools.product(
        records(), (2, 8, 16), (1, 1.2, 2, 4, 9)
    ):
        total = int(share * H200.sms) // clusters.CLUSTER  # bands of 64 outputs
        how = tile.pick_tile(m, total * BRICK_N, 4096, size, H200)
        stage = f"DecodeStage<{group}, {zeros}, {how.tokens}, {how.bands}>::kBytes"
        sums = sums_of(how, total) if how.bands > 1 else f"Sums<{how.tokens}, 1>::kBytes"
        yield f"Record<{group}, {zeros}>::kBytes", size
        yield f"kBarrierBytes + {how.stages} * {stage} + {sums}", how.smem
    yield "kMostNormed", norm.MOST_NORMED
    yield "kNormSums", norm.NORMED_SUMS
    for m, k_tiles in itertools.product(range(1, norm.MOST_NORMED + 1), (1, 5, 32)):
        how = tile.pick_normed(m, 5120, k_tiles, 4224, H200)  # one pass
        stage = f"{how.stages} * DecodeStage<128, 0, 2, {how.bands}>::kBytes"
        rows = f"kNormSums + {m} * normed_bytes<{how.cluster}>({k_tiles})"
        yield f"kBarrierBytes + {rows} + {stage} + {sums_of(how, 80)}", how.smem


def sums_of(how, total):
    """Bytes of a pass."""
    sums = f"TeamSums<{how.tokens}, {how.bands}, {how.cluster}>"
    have = min(how.bands, -(-total * how.cluster // how.blocks))
    return f"{sums}::kParts * {sums}::owned({have}) * {how.tokens} * 4"


CUTS = list(tiles.cuts(batch.INSTANCES, batch.COSTS.clusters, batch.COSTS.twin_us))


def batches():
    yield "kBatchThreads", tiles.THREADS
    yield "kMostBatchStages", tiles.MOST_STAGES
    yield "kTeams", tiles.TEAMS
    yield "kRecordN", clusters.BAND
    yield "kRecordK", tiles.SLICE
    yield "sizeof(TensorMap)", 128
    yield "kXLine", 2 * tensor_map.BOX_COLUMNS
    for ((group, zeros), size), cut in itertools.product(records(), CUTS):
        how = batch.launch(cut, 300, 8192, 64, size, H200)
        yield f"{cut.teams} == 2 && two_fit({cut.tokens}, {cut.bands}) ? 2 : 1", cut.per_sm
        if how is not None:
            bands, lines = cut.teams * cut.bands, f"result_buffers({cut.tokens}) * kResultBytes"
            stage = f"DecodedStage<{group}, {zeros}, {cut.tokens}, {bands}>::kBytes"
            yield f"kBatchBarrierBytes + {how.stages} * {stage} + {cut.teams} * {lines}", how.smem


def panel():
    yield "kPanelThreads", plan.PANEL_THREADS


def mixed():
    yield "kMixedThreads", mixed_tile.THREADS
    yield "kMixedBarrierBytes", clusters.BARRIER_BYTES
    yield "kMostSets", mixed_tile.MOST_SETS
    yield "kTwoK", mixed_arrange.TWO_K
    yield "kTwoBytes", 4 * mixed_arrange.TWO_WORDS
    yield "kFourSetBytes", 4 * mixed_arrange.SET_WORDS
    yield "kFourMarkBytes", 4 * mixed_arrange.MARK_WORDS
    yield "kHead", mixed_arrange.HEAD
    yield "kLast", outliers.LAST
    yield "kEmpty", outliers.EMPTY
    yield "kSetBytes", 4 * outliers.SET_WORDS
    for m, share, longest in itertools.product((1, 8, 9, 16), (1, 2, 4, 9), (1, 3)):
        how = mixed_tile.pick_tile(
            m, share * H200.sms // clusters.CLUSTER * BRICK_N, 4096, longest, H200
        )
        lists = f"MixedStage<{how.bands}>::x({longest} * kSetBytes)"
        stage = f"({lists} + 4 / {how.bands} * x_rows({how.tokens}, {m}) * kTwoK * 2)"
        yield stage, mixed_tile.stage_bytes(m, how.bands, longest)
        sums = f"Sums<{how.tokens}, {how.bands}>::kBytes"
        yield f"kMixedBarrierBytes + {how.stages} * {stage} + {sums} + 8 * kSpreadBytes", how.smem


def mixed_panel():
    yield "kPanelThreads", mixed_plan.PANEL_THREADS
    yield "kPanelBytes", mixed_plan.PANEL_SMEM


def mixed_batch():
    yield "kTwoHalf + kTwoMore", mixed_batches.HALF_BYTES
    for sets, longest in itertools.product((1, 2, 8), (1, 2, 20)):
        shape = mixed_arrange.Shape(64, 16 * sets, sets, 0, 1, torch.float16, longest)
        assert shape.sets == sets
        four = f"kFourScales + {sets} * kFourSetBytes + kFourMarkBytes"
        place = f"BandPlace({four}, {longest} * kSetBytes)"
        yield f"{place}.bytes", mixed_batches.band_bytes(shape)


def mixed_order():
    yield "kOrderThreads", mixed_batches.ORDER_THREADS


def read():
    yield "kReadThreads", timing.READ_THREADS
    yield "kReadBlock", timing.READ_BLOCK


def striped():
    yield "kStripeThreads", stripes.THREADS
    yield "kStageRecords", stripes.STAGE_RECORDS
    yield "kMostSmem", stripes.MOST_SMEM


def ax_stripes():
    yield from striped()
    sizes = itertools.product(ax_stripe.BANDS.items(), (32, 64, 128), (0, 1))
    for (tokens, bands), group, zeros in sizes:
        stage = f"AxStripeStage<{group}, {zeros}, {tokens}, {bands}>"
        record = 4096 + 64 * (128 // group) * (1 + zeros)
        yield f"{stage}::kBytes", ax_stripe.stage_bytes(tokens, record)
        yield f"{stage}::kStages * {stage}::kBytes", ax_stripe.smem_bytes(tokens, record)


def sparse_stripes():
    yield from striped()
    for (tokens, bands), group in itertools.product(striped_sizes.BANDS.items(), (32, 64, 128)):
        record = sparse_arrange.Shape(64, 128, 1, group, torch.float16).record_bytes
        stage = f"StripeStage<SparseRecord<{group}>::kBytes, {tokens}, {bands}>"
        yield f"SparseRecord<{group}>::kBytes", record
        yield f"{stage}::kBytes", striped_sizes.stage_bytes(tokens, bands, record)
        yield f"{stage}::kStages", striped_sizes.stages(tokens, bands, record)


def sparse_panel():
    yield "kPanelThreads", sparse_stripe_plan.PANEL_THREADS
    yield "kPanelBytes", sparse_stripe_plan.PANEL_SMEM


def ax_quant():
    yield "kMostQuantWarps * 32", ax_stripe.QUANT_THREADS
    yield "kMostQuantWarps * 8", ax_stripe.QUANT_SMEM


def ax_rounding():
    yield "kQuantThreads", ax.THREADS
    yield "kQuantRoom", ax.ROOM
    yield "kUnit", ax.UNIT


def ax_records():
    for group, asymmetric in itertools.product(ax_arrange.RECORD_GROUPS, (False, True)):
        record = f"AxRecord<{group}, {str(asymmetric).lower()}>::kBytes"
        yield record, ax_arrange.record_shape(group, 64, 128, asymmetric).record_bytes


def sparse_records():
    """Group size -> bytes."""
    for group in (32, 64, 128):
        shape = sparse_arrange.Shape(64, 128, 128 // group, group, torch.float16)
        yield group, shape.record_bytes


def sparse_decode():
    yield "kDecodeThreads", sparse_tile.THREADS
    yield "kBarrierBytes", sparse_tile.BARRIER_BYTES
    for (group, size), m, share in itertools.product(sparse_records(), (8, 16), (1, 2, 4, 9)):
        total = share * H200.sms // clusters.CLUSTER  # bands of 64 outputs
        how = sparse_tile.pick_tile(m, total * BRICK_N, 4096, size, H200)
        passes = math.ceil(total * clusters.CLUSTER / how.blocks / how.bands)
        stage = f"DecodeStage<{group}, {how.tokens}, {how.bands}>::kBytes"
        sums = f"{min(passes, 2)} * Sums<{how.tokens}, {how.bands}>::kBytes"
        yield f"SparseRecord<{group}>::kBytes", size
        yield f"kBarrierBytes + {how.stages} * {stage} + {sums}", how.smem


def sparse_batch():
    cuts = tiles.cuts(sparse_plan.COSTS.stage_us)
    for (group, size), cut in itertools.product(sparse_records(), cuts):
        how = tiles.launch(cut, 300, 8192, 64, size, H200)
        if how is not None:
            stage = f"SparseStage<{group}, {cut.tokens}, {cut.bands}>::kBytes"
            yield stage, how.stage_bytes
            yield f"kBatchBarrierBytes + {how.stages} * {stage} + 8 * kTurnBytes", how.smem


def experts():
    yield "kExpertsThreads", experts_tile.THREADS
    yield "kExpertsBands", clusters.STAGE_RECORDS
    yield "kExpertsBarrierBytes", clusters.BARRIER_BYTES
    for ((group, zeros), size), pairs in itertools.product(records(), (8, 501, 1000)):
        how = experts_tile.few(pairs, 128, 1536, size, H200)
        stage = f"ExpertsStage<{group}, {zeros}, {how.tokens}>::kBytes"
        sums = f"2 * Sums<{how.tokens}, kExpertsBands>::kBytes"
        items = routing.most_items(pairs, 128, how.tokens)
        table = f"Routing<{how.tokens}>{{0, 128, {how.own}}}.listed({items}, {pairs})"
        yield f"({table} + 127) / 128 * 128", how.table_bytes
        fixed = f"kExpertsBarrierBytes + {how.table_bytes}"
        yield f"{fixed} + {how.stages} * {stage} + {sums}", how.smem


def experts_batch():
    yield "kLeastStripe", tiles.LEAST_STRIPE
    for ((group, zeros), size), pairs in itertools.product(records(), (2000, 6000, 10000, 32768)):
        how, _ = experts_tile.many(pairs, 128, ((1536, 16), (2048, 6)), size, H200)
        bands = how.cut.teams * how.cut.bands
        stage = f"DecodedStage<{group}, {zeros}, {how.cut.tokens}, {bands}>::kBytes"
        yield f"kBatchBarrierBytes + {how.stages} * {stage} + 8 * kTurnBytes", how.smem


def around_experts():
    yield "kRouteThreads", routing.ROUTE_THREADS
    yield "kGatherThreads", routing.GATHER_THREADS
    yield "kCombineThreads", routing.COMBINE_THREADS
    yield "kItemInts", routing.ITEM_INTS
    yield "kChooseThreads", routing.CHOOSE_THREADS
    yield "kMostExperts", routing.MOST_EXPERTS


MIRRORED = {
    W4A16 / "experts.cuh": experts,
    W4A16 / "experts_batch.cuh": experts_batch,
    routing.SOURCE: around_experts,
    ENGINE / "attention.cuh": attention,
    ENGINE / "draw.cuh": draw,
    ENGINE / "small.cuh": small,
    ENGINE / "store.cuh": store,
    W4A16 / "decode.cuh": decode,
    W4A16 / "batch.cuh": batches,
    W4A16 / "panel.cuh": panel,
    W4A16 / "stripe.cuh": striped,
    SPARSE / "decode.cuh": sparse_decode,
    SPARSE / "batch.cuh": sparse_batch,
    W4AX / "stripe.cuh": ax_stripes,
    SPARSE / "stripe.cuh": sparse_stripes,
    SPARSE / "panel.cuh": sparse_panel,
    W4AX / "stripe_quant.cuh": ax_quant,
    W2416 / "decode.cuh": mixed,
    W2416 / "panel.cuh": mixed_panel,
    W2416 / "batch.cuh": mixed_batch,
    W2416 / "order.cuh": mixed_order,
    W4AX / "quant.cuh": ax_rounding,
    W4AX / "batch.cuh": ax_records,
    timing.READ.program.source: read,
}


def compare(folder, header, numbers):
    lines = [f'#include "{header}"', "namespace billfish {", "__global__ void compare() {"]
    lines += [f'static_assert(({each}) == {value}, "");' for each, value in numbers]
    source = folder / "compare.cu"
    source.write_text("\n".join([*lines, "}", "}"]))
    jit.compile(jit.Program(source, "billfish::compare"), "sm_90a")


@pytest.mark.parametrize("header", MIRRORED, ids=lambda path: "-".join(path.parts[-3:]))
def test_python_and_headers_agree(header, tmp_path):
    compare(tmp_path, header, dict.fromkeys(MIRRORED[header]()))


def test_a_difference_is_seen(tmp_path):
    wrong = [("sizeof(Chunk)", 4 * tables.ROW + 4)]
    with pytest.raises(jit.CompileError, match="static assertion failed"):
        compare(tmp_path, ENGINE / "attention.cuh", wrong)


def test_constants_inside_kernels():
    """These no static_assert can reach."""
    stored = (ENGINE / "store.cuh").read_text()
    threads = f"kTurned ? 2 * kHeadDim : {32 * fused.STORE_WARPS}, {fused.ROTATED_BLOCKS}"
    assert f"__launch_bounds__({threads})" in stored
