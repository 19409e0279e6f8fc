// attention.cuh on the emulated GPU: SEED sequences kv_heads group blocks scale smem rotary eps limit
// < pool, q, tables, head, cos, sin, norms > out. With a rotary part q is a projection's q, k and v, and
// the pool follows in the output. TYPE, FORMAT and HEAD_DIM come from the compiler's command line.
#include KERNEL_FILE

#include "launch.h"

int main(int, char** arguments) {
    lot.seed(atoi(*++arguments));
    const int sequences = atoi(*++arguments), kv_heads = atoi(*++arguments);
    const int group = atoi(*++arguments), grid = atoi(*++arguments);
    const float scale = atof(*++arguments);
    const int smem_bytes = atoi(*++arguments), rotary = atoi(*++arguments);
    const float eps = atof(*++arguments), limit = atof(*++arguments);
    std::vector<unsigned char> pool = take(), q = take(), table = take(), head = take();
    std::vector<unsigned char> cos = take(), sin = take(), norms = take();
    const std::vector<unsigned char>* sources[] = {&pool, &q, &cos, &sin};
    for (int i = 0; i < 4; ++i) {
        source_begin[i] = (const char*)sources[i]->data();
        source_end[i] = source_begin[i] + sources[i]->size() - 16;
    }
    const int items = ((const int*)head.data())[0] * kv_heads;
    std::vector<u16> out(sequences * kv_heads * group * HEAD_DIM + 64, 0xfffe);
    std::vector<float> parts((items + 1) * (HEAD_DIM * 8 + 16), NAN);
    std::vector<u32> arrived(sequences * kv_heads, 0);
    cluster_size = 1, memory_varies = true;
    not_yet(q);
    launch(grid, 1, 160, smem_bytes, [&] {
        using namespace billfish;
        const u16* norm = norms.size() <= 16 ? nullptr : (const u16*)norms.data();
        if (rotary) {
            rope_attend<TYPE, FORMAT, HEAD_DIM>(
                pool.data(), (const u16*)q.data(), (const u16*)cos.data(), (const u16*)sin.data(), norm,
                norm ? norm + HEAD_DIM : nullptr, rotary, eps, limit, out.data(), (const int*)table.data(),
                (const int*)head.data(), parts.data(), arrived.data(), kv_heads, group, scale);
            return;
        }
        attend<TYPE, FORMAT, HEAD_DIM>(pool.data(), (const u16*)q.data(), out.data(),
                                       (const int*)table.data(), (const int*)head.data(),
                                       parts.data(), arrived.data(), kv_heads, group, scale);
    });
    for (u32 count : arrived) demand(count == 0, "a counter that is left");
    for (size_t i = out.size() - 64; i < out.size(); ++i)
        demand(out[i] == 0xfffe, "a store behind the result");
    fwrite(out.data(), 2, out.size() - 64, stdout);
    if (rotary) fwrite(pool.data(), 1, pool.size() - 16, stdout);
}
