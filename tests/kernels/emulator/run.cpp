// One kernel on the emulated GPU: SEED m n x_k k_tiles grid stages smem sms cluster whole gated twins
// < inputs > outputs. KERNEL, THREADS and WITH_* come from the compiler's command line.
#define __fdividef(a, b) ((a) / (b))
#include KERNEL_FILE

#include "launch.h"

int main(int, char** arguments) {
    auto next = [&] { return atoi(*++arguments); };
    lot.seed(next());
    const int m = next(), n = next(), x_k = next(), k_tiles = next(), grid = next(), stages = next();
    const int smem_bytes = next(), sms = next(), cluster = next(), whole = next(), gated = next();
    const int twins = next();
    const int results = m * (gated ? n / 2 : n);
    cluster_size = twins ? 2 : cluster;
    std::vector<unsigned char> records = take(), x = take(), bias = take();
#ifdef NORMED  // x is hidden; what is added, or nothing, the weight, {threads, eps}
    std::vector<unsigned char> delta = take(), weight = take(), given = take();
    const u16* more = delta.size() > 16 ? (const u16*)delta.data() : nullptr;
    std::vector<u16> summed(m * x_k + 64, 0xfffe);
    int threads;
    float eps;
    memcpy(&threads, given.data(), 4), memcpy(&eps, given.data() + 4, 4);
#endif
    const std::vector<unsigned char>* inputs[3] = {&records, &x, &bias};
    for (int i = 0; i < 3; ++i) {
        source_begin[i] = (const char*)inputs[i]->data();
        source_end[i] = source_begin[i] + inputs[i]->size() - 16;
    }
    const u16* bias_at = bias.size() > 16 ? (const u16*)bias.data() : nullptr;
    std::vector<u16> out(results + 64, 0xfffe);
    std::vector<float> workspace(max(grid, sms) * THREADS * 128, NAN);
    std::vector<u32> locks(max(grid, sms) * THREADS / 32, 0);
#ifndef STRIPE  // of launches that begin when the kernel before has ended
    not_yet(x);
#endif
#ifdef NORMED
    if (more) not_yet(delta);
#endif
    launch(grid, 1, THREADS, smem_bytes, [&] {
        using namespace billfish;
#ifdef STRIPE
        KERNEL(records.data(), (const u16*)x.data(), bias_at, out.data(), workspace.data(), locks.data(),
               m, n, x_k, k_tiles);
#elif defined BATCH
        const int wide = 64 * TEAMS * BANDS << twins;
        const TensorMap map{(const u16*)x.data(), m, x_k, TOKENS};
        KERNEL(records.data(), map, bias_at, out.data(), workspace.data(), locks.data(), m, n,
               (m + TOKENS - 1) / TOKENS, (n + wide - 1) / wide, k_tiles, (x_k + 127) / 128, whole, cluster, twins,
               stages, true, gated);
#elif defined NORMED
        KERNEL(records.data(), (const u16*)x.data(), more, (const u16*)weight.data(), summed.data(), threads, eps, bias_at,
               out.data(), m, n, x_k, k_tiles, stages, gated);
#else
        KERNEL(records.data(), (const u16*)x.data(), bias_at, out.data(), m, n, x_k, k_tiles, stages, gated);
#endif
    });
    for (u32 lock : locks) demand(lock == 0, "a lock that is left");
    for (int i = results; i < results + 64; ++i) demand(out[i] == 0xfffe, "a store behind the result");
    fwrite(out.data(), 2, results, stdout);
#ifdef NORMED
    for (int i = m * x_k; i < m * x_k + 64; ++i) demand(summed[i] == 0xfffe, "a store behind the sum");
    fwrite(summed.data(), 2, m * x_k, stdout);
#endif
}
