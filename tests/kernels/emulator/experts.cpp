// w4a16_experts, or w4a16_experts_batch (BATCH), on the emulated GPU: SEED pairs each experts n k k_tiles grid
// stages smem own table cluster known gated < records x index or items > out. KERNEL, THREADS and TOKENS come from the
// compiler's command line.
#define __fdividef(a, b) ((a) / (b))
#include KERNEL_FILE

#include "launch.h"

int main(int, char** arguments) {
    auto next = [&] { return atoi(*++arguments); };
    lot.seed(next());
    memory_varies = atoi(*arguments) % 2;
    const int pairs = next(), each = next(), experts = next(), n = next(), k = next(), k_tiles = next();
    const int grid = next(), stages = next(), smem_bytes = next(), own = next(), table_bytes = next(), cluster = next();
    const int known = next(), gated = next(), results = pairs * (gated ? n / 2 : n);
    (void)each, (void)experts, (void)own, (void)table_bytes;
    cluster_size = cluster;
    std::vector<unsigned char> records = take(), x = take(), table = take();
    const std::vector<unsigned char>* inputs[2] = {&records, &x};
    for (int i = 0; i < 2; ++i) {
        source_begin[i] = (const char*)inputs[i]->data();
        source_end[i] = source_begin[i] + inputs[i]->size() - 16;
    }
    std::vector<u16> out(results + 64, 0xfffe);
    std::vector<float> workspace(grid * 256 * 128, NAN);
    std::vector<u32> locks(grid * 8, 0);
    launch(grid, 1, THREADS, smem_bytes, [&] {
        using namespace billfish;
#ifdef BATCH
        const TensorMap map{(const u16*)x.data(), pairs, k, TOKENS};
        KERNEL(records.data(), map, (const u32*)table.data(), out.data(), workspace.data(), locks.data(), n, own, k_tiles, stages, known, gated);
#else
        KERNEL(records.data(), (const u16*)x.data(), (const u32*)table.data(), out.data(), pairs, each, experts, n,
               (n + 63) / 64, k, k_tiles, stages, own, table_bytes, known, gated);
#endif
    });
    for (u32 lock : locks) demand(lock == 0, "a lock that is left");
    for (int i = results; i < results + 64; ++i) demand(out[i] == 0xfffe, "a store behind the result");
    fwrite(out.data(), 2, results, stdout);
}
