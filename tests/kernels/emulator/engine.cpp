// The engine's small kernels as a library: `run` does what Loaded.launch does, on the CPU's own memory.
// INSTANCES names a file with one ENTRY(kernel<...>) a line. Blocks run one after the other, so that
// shared memory may be a static array (STATIC_SMEM).
#include "machine.h"

#include <tuple>

#ifdef STATIC_SMEM
#undef __shared__
#undef __align__
#define __shared__ static
#define __align__(x) __attribute__((aligned(x)))
#endif

#include KERNEL_FILE

namespace billfish { unsigned char smem[1]; }

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
        lot.seed(seed);
        source_end[0] = (const char*)~0ull;  // tensors are torch's: copies are not bounded
        return launch_in_turn(grid_x, grid_y, threads, smem_bytes, [&] { entry.run(from); }) ? 0 : 2;
    }
    return 1;
}
