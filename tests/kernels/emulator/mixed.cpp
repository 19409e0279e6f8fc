// w2416_decode, or w2416_stripe, w2416_panel, w2416_order, w2416_batch (STRIPE, PANEL, ORDER, BATCH), on the
// emulated GPU: SEED m n k tiles_2 tiles_4 sets band_words grid stages smem stage gated list_bytes whole <
// records columns x bias > out. KERNEL, THREADS, TOKENS and BANDS: the compiler's command line.
#define __fdividef(a, b) ((a) / (b))
#include KERNEL_FILE

#include "launch.h"

int main(int, char** arguments) {
    auto next = [&] { return atoi(*++arguments); };
    lot.seed(next());
    memory_varies = atoi(*arguments) % 2;
    const int m = next(), n = next(), k = next(), tiles_2 = next(), tiles_4 = next(), sets = next();
    const int band_words = next(), grid = next(), stages = next(), smem_bytes = next(), stage_bytes = next();
    const int gated = next(), list_bytes = next(), whole = next();
    (void)list_bytes, (void)whole;
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
#elif defined ORDER
    const int width = tiles_2 * 256 + tiles_4 * 128, results = m * width;
    std::vector<u16> out(results + 64, 0xfffe);
    launch((width / 8 + THREADS - 1) / THREADS, grid, THREADS, smem_bytes, [&] {
        using namespace billfish;
        KERNEL((const u16*)x.data(), columns_at, out.data(), m, k, width, tiles_2 * 4);
    });
#elif defined BATCH
    const int results = m * (gated ? n / 2 : n), wide = 128 * BANDS;
    const u16* bias_at = bias.size() > 16 ? (const u16*)bias.data() : nullptr;
    std::vector<u16> out(results + 64, 0xfffe);
    std::vector<float> workspace(grid * 256 * 128, NAN);
    std::vector<u32> locks(grid * 8, 0);
    launch(grid, 1, THREADS, smem_bytes, [&] {
        using namespace billfish;
        const TensorMap map{(const u16*)x.data(), m, tiles_2 * 256 + tiles_4 * 128, TOKENS};
        KERNEL(records.data(), map, bias_at, out.data(), workspace.data(), locks.data(), m, n,
               (m + TOKENS - 1) / TOKENS, (n + wide - 1) / wide, tiles_2, tiles_4, sets, band_words, list_bytes,
               whole, stages, stage_bytes, true, gated);
    });
    for (u32 lock : locks) demand(lock == 0, "a lock that is left");
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
               locks.data(), m, n, k, tiles_2, tiles_4, sets, band_words, list_bytes, stages);
#else
        KERNEL(records.data(), columns_at, (const u16*)x.data(), bias_at, out.data(), m, n, k, tiles_2,
               tiles_4, sets, band_words, list_bytes, stages, stage_bytes, gated);
#endif
    });
    for (u32 lock : locks) demand(lock == 0, "a lock that is left");
#endif
    for (int i = results; i < results + 64; ++i) demand(out[i] == 0xfffe, "a store behind the result");
    fwrite(out.data(), 2, results, stdout);
}
