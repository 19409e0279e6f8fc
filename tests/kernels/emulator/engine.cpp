// The engine's small kernels as a library: `run` does what Loaded.launch does, on the CPU's own memory.
// INSTANCES names a file with one ENTRY(kernel<...>) a line. Blocks run one after the other, so that
// shared memory may be a static array; kernels that have it at launch are compiled with DYNAMIC_SMEM.
#include "machine.h"

#include <tuple>

#ifndef DYNAMIC_SMEM
#undef __shared__
#undef __align__
#define __shared__ static
#define __align__(x) __attribute__((aligned(x)))
#endif

#include KERNEL_FILE

namespace billfish { unsigned char smem[1]; }

static std::function<void()> the_body;
static void begin_fiber() {
    the_body();
    current->done = true;
    yield();
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

// Parameters as the driver takes them: as many bytes as they have, from eight.
template <class V>
static V take(const u64*& from) {
    V v;
    memcpy(&v, from++, sizeof v);
    return v;
}
template <class... P>
static void call(void (*kernel)(P...), const u64* from) {
    std::apply(kernel, std::tuple<P...>{take<P>(from)...});
}

struct Entry {
    const char* name;
    void (*run)(const u64*);
};
#define ENTRY(...) {#__VA_ARGS__, [](const u64* from) { call(&__VA_ARGS__, from); }},
static const Entry entries[] = {
#include INSTANCES
};

extern "C" int run(const char* name, u32 grid_x, u32 grid_y, u32 threads, u32 smem_bytes,
                   const u64* from, u32 seed) {
    for (const Entry& entry : entries) {
        if (strcmp(entry.name, name)) continue;
        lot.seed(seed), gridDim = {grid_x, grid_y};
        source_end[0] = (const char*)~0ull;  // copies may come from any tensor
        std::vector<Fiber> fibers(threads);
        the_body = [&] { entry.run(from); };
        bool ended = true;
        for (u32 i = 0; i < grid_x * grid_y && ended; ++i)
            ended = run_block(fibers, smem_bytes, i % grid_x, i / grid_x);
        return ended ? 0 : 2;
    }
    return 1;
}
