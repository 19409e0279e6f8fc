// w4ax_stripe_quant or w4ax_stripe (QUANT, PRODUCT) on the emulated GPU: SEED m n k k_tiles fours grid threads
// smem heavy gated reach < records x tokens bases bias order > out, or lines and tokens. KERNEL: the compiler's
// command line.
#define __fdividef(a, b) ((a) / (b))
#include KERNEL_FILE

#include "launch.h"

int main(int, char** arguments) {
    auto next = [&] { return atoi(*++arguments); };
    lot.seed(next());
    memory_varies = atoi(*arguments) % 2;
    const int m = next(), n = next(), k = next(), k_tiles = next(), fours = next(), grid = next();
    const int threads = next(), smem_bytes = next(), heavy = next(), gated = next();
    const float reach = strtof(*++arguments, nullptr);
    (void)n, (void)k, (void)heavy, (void)gated, (void)reach;
    std::vector<unsigned char> records = take(), x = take(), tokens = take(), bases = take(), bias = take(),
                               order = take();
    const std::vector<unsigned char>* inputs[3] = {&records, &x, &bias};
    for (int i = 0; i < 3; ++i) {
        source_begin[i] = (const char*)inputs[i]->data();
        source_end[i] = source_begin[i] + inputs[i]->size() - 16;
    }
#ifdef QUANT
    const int size = m * k_tiles * 128;
    std::vector<unsigned char> lines(size + 64, 0xfe);
    std::vector<u32> pairs(2 * m + 16, 0xfffefffe);
    launch(grid, 1, threads, smem_bytes, [&] {
        using namespace billfish;
        KERNEL((const u16*)x.data(), order.size() > 16 ? (const int*)order.data() : nullptr, lines.data(),
               (uint2*)pairs.data(), k, k_tiles, fours, reach);
    });
    for (int i = 0; i < 64; ++i) demand(lines[size + i] == 0xfe, "a store behind the result");
    for (int i = 0; i < 16; ++i) demand(pairs[2 * m + i] == 0xfffefffe, "a store behind the result");
    fwrite(lines.data(), 1, size, stdout);
    fwrite(pairs.data(), 8, m, stdout);
#else
    const int results = m * (gated ? n / 2 : n);
    std::vector<u16> out(results + 64, 0xfffe);
    std::vector<u32> workspace(grid * 256 * 64, 0xfffefffe), locks(grid, 0);
    launch(grid, 1, threads, smem_bytes, [&] {
        using namespace billfish;
        KERNEL(records.data(), x.data(), (const uint2*)tokens.data(), (const float*)bases.data(),
               bias.size() > 16 ? (const u16*)bias.data() : nullptr, out.data(), workspace.data(), locks.data(), m,
               n, k_tiles, fours, heavy, gated);
    });
    for (u32 lock : locks) demand(lock == 0, "a lock that is left");
    for (int i = results; i < results + 64; ++i) demand(out[i] == 0xfffe, "a store behind the result");
    fwrite(out.data(), 2, results, stdout);
#endif
}
