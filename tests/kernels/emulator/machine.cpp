// What the emulated GPU does behind a kernel's back, compiled once for all programs: copies, and how a grid of
// fibers runs.
#include "machine.h"

std::vector<Block> blocks;
std::vector<int> cluster_arrivals;
static std::vector<std::function<void()>> flying;

static void check_source(const void* from, u32 bytes) {
    for (int i = 0; i < 4; ++i)
        if ((const char*)from >= source_begin[i] && (const char*)from + bytes <= source_end[i]) return;
    demand(false, "a copy from outside its tensor");
}

void begin_copy(u32 to, const void* from, u32 bytes) {
    if (bytes) check_source(from, bytes);
    unsigned char* place = smem_at(to, 16);
    memset(place, 0xff, 16);  // NaN for whoever reads before it has landed
    current->groups.back().push_back([=] { memset(place, 0, 16), memcpy(place, from, bytes); });
}

void commit_group() { current->groups.emplace_back(); }

void wait_groups(int pending) {
    auto& groups = current->groups;
    for (int i = 0; i + 1 + pending < (int)groups.size(); ++i) {
        for (auto& copy : groups[i]) copy();
        groups[i].clear();
    }
}

void arrive_after_copies(Barrier& barrier) {
    auto copies = std::move(current->groups.back());
    current->groups.back().clear();
    flying.push_back([copies, &barrier] {
        for (auto& copy : copies) copy();
        barrier.arrive();
    });
}

void begin_bulk(u32 to, const void* from, u32 bytes, Barrier& barrier) {
    check_source(from, bytes);
    unsigned char *first = smem_at(to, 16), *last = smem_at(to + bytes - 16, 16);
    demand(last - first == (long)bytes - 16, "bulk copy");
    memset(first, 0xff, bytes);
    flying.push_back([=, &barrier] { memcpy(first, from, bytes), barrier.complete(bytes); });
}

// A box of 64 columns; chunks of 16 bytes are XORed with the row (bits 7 to 9 of their address).
void begin_tensor(u32 to, const u16* from, int rows, int columns, int box, int column, int row,
                         Barrier& barrier) {
    unsigned char* place = smem_at(to, 16);
    smem_at(to + box * 128 - 16, 16);
    memset(place, 0xff, box * 128);
    flying.push_back([=, &barrier] {
        for (int i = 0; i < box * 64; ++i) {
            const int r = row + i / 64, c = column + i % 64;
            const u16 v = r < rows && c < columns ? from[(u64)r * columns + c] : 0;
            const int at = i / 64 * 128 + ((i % 64 / 8 ^ i / 64 % 8) << 4) + i % 8 * 2;
            memcpy(place + at, &v, 2);
        }
        barrier.complete(box * 128);
    });
}

void begin_remote(u32 to, float a, float b, Barrier& barrier) {
    unsigned char* place = smem_at(to, 8);
    flying.push_back([=, &barrier] {
        const float v[2] = {a, b};
        memcpy(place, v, 8), barrier.complete(8);
    });
}

static std::function<void()> the_body;
static void begin_fiber() {
    the_body();
    current->done = true;
    ++current->block->ended;
    yield();
}

void launch(u32 grid_x, u32 grid_y, u32 threads, u32 smem_bytes, const std::function<void()>& body) {
    the_body = body;
    blocks.clear(), flying.clear();
    blocks.resize(grid_x * grid_y), cluster_arrivals.assign(grid_x * grid_y, 0);
    gridDim = {grid_x, grid_y}, blockDim = {threads, 1};
    std::vector<Fiber> fibers(grid_x * grid_y * threads);
    for (u32 b = 0; b < grid_x * grid_y; ++b) {
        Block& block = blocks[b];
        block.threads = threads;
        // NaN as 16 bits and as 32, with sign and without: also what a list of outliers ends with, or not
        block.smem.assign(smem_bytes, memory_varies ? 0x7f : 0xff), block.barriers.resize(smem_bytes / 8);
        block.warps.resize(threads / 32), block.groups.resize(threads / 128 + 1);
        for (u32 t = 0; t < threads; ++t) {
            Fiber& fiber = fibers[b * threads + t];
            fiber.block = &block, fiber.thread = t, fiber.index = b;
            fiber.prepare(begin_fiber);
        }
    }
    const u32 warps = fibers.size() / 32, slow = memory_varies ? 4u << lot() % 6 : 4u;
    std::vector<u32> alive(warps);
    for (u32 w = 0; w < warps; ++w) alive[w] = w;
    for (u64 turns = 0; !alive.empty(); ++turns) {
        demand(turns < 40'000'000, "somebody waits for ever");
        if (!flying.empty() && lot() % slow == 0) {
            const u32 i = lot() % flying.size();
            auto land = std::move(flying[i]);
            flying[i] = std::move(flying.back()), flying.pop_back();
            land();
            continue;
        }
        const u32 pick = lot() % alive.size(), w = alive[pick];
        bool some = false;
        for (u32 t = 0; t < 32; ++t) {
            Fiber& fiber = fibers[w * 32 + t];
            if (fiber.done) continue;
            some = true;
            threadIdx = {fiber.thread, 0}, blockIdx = {fiber.index % grid_x, fiber.index / grid_x};
            enter(fiber);
        }
        if (!some) alive[pick] = alive.back(), alive.pop_back();
    }
    demand(flying.empty(), "copies that nobody waited for");
}

static bool run_block(std::vector<Fiber>& fibers, u32 smem_bytes, u32 x, u32 y) {
    Block block;
    block.smem.assign(smem_bytes, 0xff);
    block.threads = fibers.size();
    block.warps.resize(block.threads / 32);
    for (u32 t = 0; t < block.threads; ++t) {
        Fiber& fiber = fibers[t];
        fiber.block = &block, fiber.thread = t;
        fiber.prepare(begin_fiber);
    }
    std::vector<u32> alive(block.threads / 32);
    for (u32 w = 0; w < alive.size(); ++w) alive[w] = w;
    blockIdx = {x, y}, blockDim = {block.threads, 1};
    for (u64 turns = 0; !alive.empty(); ++turns) {
        if (turns == 1'000'000) return false;  // somebody waits for ever
        const u32 pick = lot() % alive.size(), w = alive[pick];
        bool some = false;
        for (u32 t = w * 32; t < w * 32 + 32; ++t) {
            if (fibers[t].done) continue;
            some = true, threadIdx = {t, 0};
            enter(fibers[t]);
        }
        if (!some) alive[pick] = alive.back(), alive.pop_back();
    }
    return true;
}

bool launch_in_turn(u32 grid_x, u32 grid_y, u32 threads, u32 smem_bytes, const std::function<void()>& body) {
    the_body = body;
    gridDim = {grid_x, grid_y};
    std::vector<Fiber> fibers(threads);
    bool ended = true;
    for (u32 i = 0; i < grid_x * grid_y && ended; ++i)
        ended = run_block(fibers, smem_bytes, i % grid_x, i / grid_x);
    return ended;
}

std::vector<unsigned char> take() {
    u64 length = 0;
    demand(fread(&length, 8, 1, stdin) == 1, "input");
    std::vector<unsigned char> bytes(length + 16);
    demand(fread(bytes.data(), 1, length, stdin) == length, "input");
    return bytes;
}
