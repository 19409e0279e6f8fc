// w4a16_24_panel on the emulated GPU: SEED rows k k_tiles bands threads smem < records > out. KERNEL comes from
// the compiler's command line.
#include KERNEL_FILE

#include "launch.h"

int main(int, char** arguments) {
    auto next = [&] { return atoi(*++arguments); };
    lot.seed(next());
    const int rows = next(), k = next(), k_tiles = next(), bands = next(), threads = next(), smem_bytes = next();
    const std::vector<unsigned char> records = take();
    std::vector<u16> out(rows * k + 64, 0xfffe);
    launch(k_tiles, bands, threads, smem_bytes, [&] {
        using namespace billfish;
        KERNEL(records.data(), out.data(), rows, k);
    });
    for (int i = rows * k; i < rows * k + 64; ++i) demand(out[i] == 0xfffe, "a store behind the result");
    fwrite(out.data(), 2, rows * k, stdout);
}
