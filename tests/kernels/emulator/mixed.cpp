// w2416_decode, w2416_stripe (STRIPE) or w2416_panel (PANEL) on the emulated GPU: SEED m n k tiles_2 tiles_4
// sets band_words grid stages smem stage gated < records columns x bias > out. KERNEL, THREADS: the compiler's
// command line.
#define __fdividef(a, b) ((a) / (b))
#include KERNEL_FILE

#include "launch.h"

int main(int, char** arguments) {
    auto next = [&] { return atoi(*++arguments); };
    lot.seed(next());
    memory_varies = atoi(*arguments) % 2;
    const int m = next(), n = next(), k = next(), tiles_2 = next(), tiles_4 = next(), sets = next();
    const int band_words = next(), grid = next(), stages = next(), smem_bytes = next(), stage_bytes = next();
    const int gated = next();
    std::vector<unsigned char> records = take(), columns = take(), x = take(), bias = take();
    const std::vector<unsigned char>* inputs[3] = {&records, &x, &bias};
    for (int i = 0; i < 3; ++i) {
        source_begin[i] = (const char*)inputs[i]->data();
        source_end[i] = source_begin[i] + inputs[i]->size() - 16;
    }
    const int* columns_at = (const int*)columns.data();
#ifdef PANEL
    const int results = n * k;
    std::vector<u16> out(results + 64, 0xfffe);
    launch(tiles_2 + tiles_4, grid, THREADS, smem_bytes, [&] {
        using namespace billfish;
        KERNEL(records.data(), columns_at, out.data(), n, k, tiles_2, tiles_4, sets, band_words);
    });
#else
    const int results = m * (gated ? n / 2 : n);
    const u16* bias_at = bias.size() > 16 ? (const u16*)bias.data() : nullptr;
    std::vector<u16> out(results + 64, 0xfffe);
    std::vector<float> workspace(grid * 128 * 16, NAN);
    std::vector<u32> locks(grid, 0);
    launch(grid, 1, THREADS, smem_bytes, [&] {
        using namespace billfish;
#ifdef STRIPE
        KERNEL(records.data(), columns_at, (const u16*)x.data(), bias_at, out.data(), workspace.data(),
               locks.data(), m, n, k, tiles_2, tiles_4, sets, band_words, stages);
#else
        KERNEL(records.data(), columns_at, (const u16*)x.data(), bias_at, out.data(), m, n, k, tiles_2,
               tiles_4, sets, band_words, stages, stage_bytes, gated);
#endif
    });
    for (u32 lock : locks) demand(lock == 0, "a lock that is left");
#endif
    for (int i = results; i < results + 64; ++i) demand(out[i] == 0xfffe, "a store behind the result");
    fwrite(out.data(), 2, results, stdout);
}
