// The smallest kernel that shows a toolchain works: compiled, loaded, launched and compared by
// `billfish doctor` and the tests. y[i] = kFactor * x[i] + i, exact in fp32 for small numbers.
namespace billfish {

template <int kFactor>
__global__ void probe(float* y, const float* x, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) y[i] = kFactor * x[i] + i;
}

}  // namespace billfish
