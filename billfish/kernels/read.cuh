// Reads memory and keeps nothing: how fast a card reads is the roof of every kernel whose time goes
// to weights. A block reads kReadBlock bytes, each thread with kLoads 16-byte loads in flight.
namespace billfish {

constexpr int kReadThreads = 512, kLoads = 8, kReadBlock = kReadThreads * kLoads * 16;

__global__ void __launch_bounds__(kReadThreads) read_block(const uint4* x, uint4* never) {
  const uint4* own = x + static_cast<long long>(blockIdx.x) * kReadThreads * kLoads + threadIdx.x;
  uint4 loaded[kLoads], sum = {};
#pragma unroll
  for (int i = 0; i < kLoads; ++i) loaded[i] = own[i * kReadThreads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    sum.x ^= loaded[i].x, sum.y ^= loaded[i].y, sum.z ^= loaded[i].z, sum.w ^= loaded[i].w;
  }
  // Never so in practice, which the compiler cannot know.
  if (never != nullptr && (sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x9e3779b9u) *never = sum;
}

}  // namespace billfish
