// Token embedding on the GPU: row ids[t] of the weight becomes row t of the output, zeros where ids[t] is
// none. Threads side by side copy a row, several short rows a block; accesses as wide as addresses and sizes
// allow. Source: none needed.
#include "../common/gpu.cuh"
#include "embedding.h"

namespace pelton::gpu {
namespace {

constexpr int kUnroll = 4;  // accesses of a thread that are under way together

template <class Access>
__global__ void embedding_kernel(const EmbeddingArgs a, int64_t tokens) {
  const int64_t items = a.row_bytes / int64_t(sizeof(Access));
  for (int64_t token = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; token < tokens;
       token += int64_t(gridDim.x) * blockDim.y) {
    const int64_t id = a.ids[token];
    const bool known = uint64_t(id) < uint64_t(a.vocabulary);
    const Access* from = reinterpret_cast<const Access*>(static_cast<const char*>(a.weight) +
                                                         (known ? id : 0) * a.weight_stride);
    Access* to = reinterpret_cast<Access*>(static_cast<char*>(a.out) + token * a.out_stride);
    const int64_t step = int64_t(gridDim.y) * blockDim.x;
    for (int64_t first = blockIdx.y * int64_t(blockDim.x) + threadIdx.x; first < items;
         first += kUnroll * step) {
      Access part[kUnroll] = {};
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        if (known && first + k * step < items) part[k] = from[first + k * step];
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        if (first + k * step < items) to[first + k * step] = part[k];
      }
    }
  }
}

}  // namespace

int embedding(const EmbeddingArgs& args, int64_t tokens, void* stream) {
  if (tokens == 0 || args.row_bytes == 0) return 0;
  const int bytes = access_bytes(
      {address(args.weight), address(args.out), args.row_bytes, args.weight_stride, args.out_stride});
  const RowGrid shape(tokens, args.row_bytes / bytes, kUnroll);
  dispatch_access(bytes, [&](auto access) {
    embedding_kernel<decltype(access)><<<shape.grid, shape.block, 0, cudaStream_t(stream)>>>(args, tokens);
  });
  return launch_result();
}

}  // namespace pelton::gpu
