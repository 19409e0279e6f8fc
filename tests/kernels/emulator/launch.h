// How a grid of fibers runs, and how a program here gets its inputs. After the kernel's own text.
#pragma once

namespace billfish { unsigned char smem[1]; }

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

static std::vector<unsigned char> take() {  // length, then bytes; on a multiple of 16
    u64 length = 0;
    demand(fread(&length, 8, 1, stdin) == 1, "input");
    std::vector<unsigned char> bytes(length + 16);
    demand(fread(bytes.data(), 1, length, stdin) == length, "input");
    return bytes;
}
