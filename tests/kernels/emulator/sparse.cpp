// w4a16_24_decode or w4a16_24_batch (DECODE, BATCH) on the emulated GPU: SEED m n k k_tiles grid stages smem whole
// gated splits < records x bias > out. KERNEL, THREADS, TOKENS and BANDS: the compiler's command line.
#define __fdividef(a, b) ((a) / (b))
#include KERNEL_FILE

#include "launch.h"

int main(int, char** arguments) {
    auto next = [&] { return atoi(*++arguments); };
    lot.seed(next());
    memory_varies = atoi(*arguments) % 2;
    const int m = next(), n = next(), k = next(), k_tiles = next(), grid = next(), stages = next();
    const int smem_bytes = next(), whole = next(), gated = next(), splits = next();
    if (splits > 1) cluster_size = splits;
    std::vector<unsigned char> records = take(), x = take(), bias = take();
    const std::vector<unsigned char>* inputs[2] = {&records, &x};
    for (int i = 0; i < 2; ++i) {
        source_begin[i] = (const char*)inputs[i]->data();
        source_end[i] = source_begin[i] + inputs[i]->size() - 16;
    }
    const int results = m * (gated ? n / 2 : n), wide = 128 * BANDS;
    const u16* bias_at = bias.size() > 16 ? (const u16*)bias.data() : nullptr;
    std::vector<u16> out(results + 64, 0xfffe);
    std::vector<float> workspace(grid * 256 * 128, NAN);
    std::vector<u32> locks(grid * 8, 0);
    launch(grid, 1, THREADS, smem_bytes, [&] {
        using namespace billfish;
        const TensorMap map{(const u16*)x.data(), m, k, TOKENS};
#ifdef DECODE
        KERNEL(records.data(), map, bias_at, out.data(), m, n, k_tiles, stages, gated);
#else
        KERNEL(records.data(), map, bias_at, out.data(), workspace.data(), locks.data(), m, n,
               (m + TOKENS - 1) / TOKENS, (n + wide - 1) / wide, k_tiles, whole, splits, stages, true, gated);
#endif
    });
    for (u32 lock : locks) demand(lock == 0, "a lock that is left");
    for (int i = results; i < results + 64; ++i) demand(out[i] == 0xfffe, "a store behind the result");
    fwrite(out.data(), 2, results, stdout);
}
