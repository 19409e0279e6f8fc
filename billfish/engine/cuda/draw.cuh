// draw: samples the next token of each row of logits by its sequence's rule: the argmax, or a draw
// by temperature, min_p, top_k and top_p with sampling.py's result for the same random number. So
// sampled sequences, too, decode ahead of the host (core.py).
//
// Probabilities are unnormalised integers, 2^40 times exp((x - best) / temperature): their sums are
// exact in any order, and the token depends on the logits and the random number alone. Logits have
// 16 bits, so top_k and top_p end at one of 65536 values: two histograms find it, of the upper 11
// bits and of the lower 5. Among equal logits the lowest ids are kept.
//
// One block a row. Warp w has the w-th part of the tokens, a lane 8 of them at a time.
#pragma once

#include "billfish/mma.cuh"
#include "billfish/warp.cuh"

namespace billfish {

constexpr int kDrawThreads = 1024, kDrawWarps = kDrawThreads / 32;
constexpr int kBins = 2048, kValues = 32;  // of the histograms: 11 + 5 bits

// As Chooser.rule writes it.
struct Rule {
    float heat;     // log2(e) / temperature; 0: greedy
    float deepest;  // log2(1 / min_p)
    int top_k;      // 0: all
    float top_p;    // 1: all
    u32 low, high;  // 52 bits of the sequence's own random stream
    int unused[2];
};

// Prefix sum over lanes: of the lanes before this one, and of all.
struct Before {
    u64 mine, all;
};
BILLFISH_DEVICE u64 shuffle_wide(u64 v, int lane) {
    const u64 high = shuffle(static_cast<u32>(v >> 32), lane);
    return high << 32 | shuffle(static_cast<u32>(v), lane);
}
BILLFISH_DEVICE Before sum_before(u64 v, int lane) {
    u64 sum = v;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u64 other = shuffle_wide(sum, lane - step & 31);
        if (lane >= step) sum += other;
    }
    return {sum - v, shuffle_wide(sum, 31)};
}

// The largest of some logits, and its token: of equals the first. A NaN counts as largest, so that
// it is reported.
struct Peak {
    float best = __uint_as_float(0xff800000u);
    int at = 0x7fffffff;
    BILLFISH_DEVICE void take(float v, int i) {
        const bool nan = v != v, had = best != best;
        const bool equal = v == best || (nan && had);
        if (equal ? i < at : nan || v > best) best = v, at = i;
    }
    BILLFISH_DEVICE void take_lanes() {
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
            const float v = shuffle_xor(best, mask);
            take(v, static_cast<int>(shuffle_xor(static_cast<u32>(at), mask)));
        }
    }
};

// One row of logits, as all threads of the block see it.
template <class T>
struct Row {
    const u16* logits;
    int width, first, end;  // of this warp's tokens
    bool wide;              // 16 bytes at once
    float best;
    Rule rule;

    // Bits of 8 tokens from `at` on; -inf past the last one.
    template <bool kWide>
    BILLFISH_DEVICE void load(u32 (&v)[8], int at) const {
        const u32 none = T::from_float(__uint_as_float(0xff800000u));
        if constexpr (kWide) {
            const u32 two = none << 16 | none;
            uint4 four{two, two, two, two};
            if (at < width) four = *reinterpret_cast<const uint4*>(logits + at);
            const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = words[i / 2] >> i % 2 * 16 & 0xffff;
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = at + i < width ? logits[at + i] : none;
        }
    }
    BILLFISH_DEVICE void load(u32 (&v)[8], int at) const {
        wide ? load<true>(v, at) : load<false>(v, at);
    }
    BILLFISH_DEVICE u64 weight(u32 bits) const {
        const float depth = (best - T::to_float(bits)) * rule.heat;
        if (!(depth <= rule.deepest) || depth > 40) return 0;  // NaN: never
        return static_cast<u64>(exp2_fast(-depth) * 1099511627776.0f);
    }
    // 0 for the largest of all 16-bit numbers, rising as they fall; -0 counts as 0.
    static BILLFISH_DEVICE u32 rank(u32 bits) {
        if (bits == 0x8000) bits = 0;
        return bits & 0x8000 ? bits : 0x7fff - bits;
    }
    static BILLFISH_DEVICE u32 bits_of(u32 rank) {
        return rank & 0x8000 ? rank : 0x7fff - rank;
    }
    // Of a lane's tokens, 8 after 8: where their largest is a new one is all that is kept, and its
    // place among the 8 is found in the end. Compared one by one, 128256 took 23 us.
    template <bool kWide>
    BILLFISH_DEVICE Peak peak(int lane) const {
        constexpr int kDeep = 4;  // loads under way
        Peak found;
        for (int at = first + 8 * lane; at < end; at += 256 * kDeep) {
            u32 v[kDeep][8];
#pragma unroll
            for (int i = 0; i < kDeep; ++i) load<kWide>(v[i], at + 256 * i);
#pragma unroll
            for (int i = 0; i < kDeep; ++i) {
                float top = T::to_float(v[i][0]);
                bool nan = top != top;
#pragma unroll
                for (int j = 1; j < 8; ++j) {
                    const float other = T::to_float(v[i][j]);
                    top = fmaxf(top, other), nan |= other != other;
                }
                if (nan) top = __uint_as_float(0x7fc00000u);
                if (nan ? found.best == found.best : top > found.best)
                    found = {top, at + 256 * i};
            }
        }
        if (found.at >= width) return found;
        u32 v[8];
        load<kWide>(v, found.at);
        Peak exact;
#pragma unroll
        for (int i = 0; i < 8; ++i) exact.take(T::to_float(v[i]), found.at + i);
        return exact;
    }
    template <class Each>
    BILLFISH_DEVICE void each(int lane, Each&& take) const {  // take(bits, token)
#pragma unroll 2
        for (int at = first + 8 * lane; at < end; at += 256) {
            u32 v[8];
            load(v, at);
#pragma unroll
            for (int i = 0; i < 8; ++i) take(v[i], at + i);
        }
    }
};

// Where top_k or top_p ends: all smaller ranks are kept, and `equals` tokens of this one.
struct Last {
    u32 rank;
    u32 equals;
};

struct Found {
    int bin;  // kBins: all tokens are kept
    u64 count, mass;
};

struct DrawRoom {
    u64 mass[kBins];
    u32 count[kBins], values[kValues];
    u64 sums[kDrawWarps];
    u32 equals[kDrawWarps];
    Peak peaks[kDrawWarps];
    Last last;
    u64 reached;  // weight of all that top_k keeps
    Found found;
};

// One warp: the first bin in which the count or the mass reaches `wanted`, and the sums before it.
BILLFISH_DEVICE Found find_bin(const DrawRoom& room, int lane, bool tokens, u64 wanted) {
    constexpr int kEach = kBins / 32;
    u64 count = 0, mass = 0;
    for (int i = 0; i < kEach; ++i) {  // staggered by lane: no bank conflicts
        const int bin = lane * kEach + (i + lane) % kEach;
        count += room.count[bin], mass += room.mass[bin];
    }
    const u64 counts = sum_before(count, lane).mine, masses = sum_before(mass, lane).mine;
    const u64 before = tokens ? counts : masses, own = tokens ? count : mass;
    const u32 there = ballot(before + own >= wanted);
    if (there == 0) return {kBins, 0, 0};
    const int lucky = 31 - __clz(there & -there);
    Found found{lucky * kEach, shuffle_wide(counts, lucky), shuffle_wide(masses, lucky)};
    for (; found.bin < lucky * kEach + kEach - 1; ++found.bin) {
        const u64 c = room.count[found.bin], m = room.mass[found.bin];
        if ((tokens ? found.count + c : found.mass + m) >= wanted) break;
        found.count += c, found.mass += m;
    }
    return found;
}

// All threads: Last for `wanted` tokens or mass, and the mass up to there.
template <class T>
BILLFISH_DEVICE void narrow(DrawRoom& room, const Row<T>& row, int lane, bool tokens, u64 wanted) {
    if (threadIdx.x < 32) {
        const Found first = find_bin(room, lane, tokens, wanted);
        room.values[lane] = 0;
        if (lane == 0) room.found = first;
    }
    __syncthreads();
    const Found found = room.found;
    if (found.bin == kBins) return;
    row.each(lane, [&](u32 bits, int) {
        const u32 rank = row.rank(bits);
        if (rank / kValues == static_cast<u32>(found.bin) && row.weight(bits) > 0)
            add_shared(&room.values[rank % kValues], 1u);
    });
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 count = found.count, mass = found.mass;
        for (u32 i = 0; i < kValues; ++i) {
            const u32 rank = found.bin * kValues + i;
            const u64 many = room.values[i];
            if (many == 0) continue;
            const u64 each = row.weight(row.bits_of(rank));
            const u64 lacking = wanted - (tokens ? count : mass), size = tokens ? 1 : each;
            const u64 taken = (lacking + size - 1) / size;
            if (taken <= many) {
                // top_p after top_k: whichever ends sooner.
                Last& last = room.last;
                if (rank < last.rank || (rank == last.rank && taken < last.equals))
                    last = {rank, static_cast<u32>(taken)};
                room.reached = mass + taken * each;
                break;
            }
            count += many, mass += many * each;
        }
    }
    __syncthreads();
}

template <class T>
__global__ void __launch_bounds__(kDrawThreads)
draw(const u16* logits, const Rule* __restrict__ rules, u32* found, int width) {
    __shared__ DrawRoom room;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = (width + kDrawWarps * 256 - 1) / (kDrawWarps * 256) * 256;
    const int first = min(warp * part, width);
    Row<T> row{logits + static_cast<u64>(blockIdx.x) * width, width, first,
               min(first + part, width), width % 8 == 0, 0, rules[blockIdx.x]};
#if __CUDA_ARCH__ >= 900
    launch_dependents();
    dependency_wait();
#endif
    Peak peak = row.wide ? row.template peak<true>(lane) : row.template peak<false>(lane);
    peak.take_lanes();
    if (lane == 0) room.peaks[warp] = peak;
    __syncthreads();
    peak = room.peaks[lane];
    peak.take_lanes();
    const float best = row.best = peak.best;
    const int at = peak.at;
    u32* const to = found + 2 * blockIdx.x;
    const bool finite = best - best == 0;
    if (row.rule.heat == 0 || !finite) {
        if (threadIdx.x == 0) to[0] = at < width ? at : 0, to[1] = float_bits(best);
        return;
    }
    const bool by_count = row.rule.top_k > 0, by_mass = row.rule.top_p < 1;
    if (threadIdx.x == 0) room.last = {0xffffffffu, 0}, room.reached = 0;
    if (by_count || by_mass) {
        for (int i = threadIdx.x; i < kBins; i += kDrawThreads) room.count[i] = 0, room.mass[i] = 0;
        __syncthreads();
        row.each(lane, [&](u32 bits, int) {
            const u64 weight = row.weight(bits);
            if (weight == 0) return;
            const u32 bin = row.rank(bits) / kValues;
            add_shared(&room.count[bin], 1u);
            add_shared(&room.mass[bin], weight);
        });
        __syncthreads();
        if (by_count) narrow(room, row, lane, true, row.rule.top_k);
        if (by_mass) {
            u64 all = room.reached, mass = 0;
            if (all == 0) {
                for (int i = lane; i < kBins; i += 32) mass += room.mass[i];
                all = sum_before(mass, lane).all;
            }
            const double wanted = ceil(static_cast<double>(all) * row.rule.top_p);
            narrow(room, row, lane, false, static_cast<u64>(wanted));
        }
    }
    __syncthreads();
    // Mass of the kept tokens, in the order of ids; of those equal to the last, the lowest ids.
    const Last last = room.last;
    const u64 each = last.equals > 0 ? row.weight(row.bits_of(last.rank)) : 0;
    u64 sum = 0;
    u32 equals = 0;
    row.each(lane, [&](u32 bits, int) {
        const u32 rank = row.rank(bits);
        if (rank < last.rank) sum += row.weight(bits);
        equals += rank == last.rank;
    });
    sum = sum_before(sum, lane).all, equals = static_cast<u32>(sum_before(equals, lane).all);
    if (lane == 0) room.sums[warp] = sum, room.equals[warp] = equals;
    __syncthreads();
    const u32 of_lane = room.equals[lane];
    const u32 ahead = static_cast<u32>(sum_before(of_lane, lane).mine);
    const u32 kept = min(max(last.equals, ahead) - ahead, of_lane);
    const u64 own = room.sums[lane] + kept * each;
    const Before sums = sum_before(own, lane);
    const double share = static_cast<double>(static_cast<u64>(row.rule.high) << 32 | row.rule.low)
                         * 0x1p-52;
    u64 target = static_cast<u64>(static_cast<double>(sums.all) * share);
    if (target >= sums.all) target = sums.all - 1;
    const u32 holds = ballot(sums.mine <= target && target < sums.mine + own);
    if (warp != 31 - __clz(holds)) return;
    target -= shuffle_wide(sums.mine, warp);
    u32 left = shuffle(max(last.equals, ahead) - ahead, warp);  // equal ones that this warp keeps
    for (int at = row.first + 8 * lane; at - 8 * lane < row.end; at += 256) {
        u32 v[8];
        u64 weights[8], mine = 0;
        row.load(v, at);
        u32 same = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) same += row.rank(v[i]) == last.rank && at + i < width;
        const Before alike = sum_before(same, lane);
        u32 room_left = max(left, static_cast<u32>(alike.mine)) - static_cast<u32>(alike.mine);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 rank = row.rank(v[i]);
            bool keep = rank < last.rank;
            if (rank == last.rank && room_left > 0) keep = true, --room_left;
            weights[i] = keep ? row.weight(v[i]) : 0, mine += weights[i];
        }
        const Before here = sum_before(mine, lane);
        if (target < here.all) {
            if (here.mine <= target && target < here.mine + mine) {
                u64 sum = here.mine;
                int before = 0;
#pragma unroll
                for (int i = 0; i < 8; ++i) sum += weights[i], before += sum <= target;
                to[0] = at + before, to[1] = float_bits(best);
            }
            return;
        }
        target -= here.all;
        left = max(left, static_cast<u32>(alike.all)) - static_cast<u32>(alike.all);
    }
}

}  // namespace billfish
