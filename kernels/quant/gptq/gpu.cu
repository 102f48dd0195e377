// The rows of GPTQ's layout in another order, one thread a word; and the choice between the products of 4 and
// of 8 bits, which gpu_4.cu and gpu_8.cu have.
// Method: Frantar et al., "GPTQ", 2022.
#include "gptq.h"

#include "../../common/gpu.cuh"

namespace pelton::gpu {
namespace {

template <int Bits>
__global__ void __launch_bounds__(256) shuffle_kernel(const GptqShuffleArgs a) {
  constexpr int kFields = 32 / Bits;
  constexpr uint32_t kMask = (1u << Bits) - 1;
  const int64_t column = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (column >= a.columns) return;
  for (int64_t word = blockIdx.y; word < a.rows / kFields; word += gridDim.y) {
    uint32_t made = 0;
    for (int i = 0; i < kFields; ++i) {
      const int64_t row = a.order[word * kFields + i];
      if (row < 0 || row >= a.source_rows) continue;
      const auto from = uint32_t(a.weight[row / kFields * a.columns + column]);
      made |= (from >> (Bits * int(row % kFields)) & kMask) << (Bits * i);
    }
    a.out[word * a.columns + column] = int32_t(made);
  }
}

}  // namespace

int gptq_gemm(const QuantProductArgs& a, void* stream) {
  return a.bits == 4 ? gptq::product_4(a, stream) : gptq::product_8(a, stream);
}

int gptq_dequantize(const DequantizeArgs& a, void* stream) {
  return a.bits == 4 ? gptq::dequantize_4(a, stream) : gptq::dequantize_8(a, stream);
}

int gptq_shuffle(const GptqShuffleArgs& a, void* stream) {
  const int64_t words = a.rows / (32 / a.bits);
  if (words == 0 || a.columns == 0) return 0;
  const dim3 grid(grid_size(ceil_div<int64_t>(a.columns, 256)), unsigned(words < 65535 ? words : 65535));
  if (a.bits == 4) {
    shuffle_kernel<4><<<grid, 256, 0, cudaStream_t(stream)>>>(a);
  } else {
    shuffle_kernel<8><<<grid, 256, 0, cudaStream_t(stream)>>>(a);
  }
  return launch_result();
}

}  // namespace pelton::gpu
