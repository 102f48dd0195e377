// Token embedding on the GPU: row ids[t] of the weight becomes row t of the output, zeros where ids[t] is
// none. Threads go over the accesses of a row (x), as wide as addresses and sizes allow, and tokens (y).
// Source: none needed.
#include "../common/gpu.cuh"
#include "embedding.h"

namespace pelton::gpu {
namespace {

constexpr int kThreads = 256;

template <class Access>
__global__ void __launch_bounds__(kThreads) embedding_kernel(const EmbeddingArgs a, int64_t tokens) {
  const int64_t token = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= tokens) return;
  const int64_t id = a.ids[token], accesses = a.row_bytes / int64_t(sizeof(Access));
  const bool known = uint64_t(id) < uint64_t(a.vocabulary);
  const char* row = static_cast<const char*>(a.weight) + (known ? id * a.weight_stride : 0);
  const Access* from = reinterpret_cast<const Access*>(row);
  Access* to = reinterpret_cast<Access*>(static_cast<char*>(a.out) + token * a.out_stride);
  for (int64_t i = threadIdx.x; i < accesses; i += blockDim.x) to[i] = known ? from[i] : Access{};
}

}  // namespace

int embedding(const EmbeddingArgs& args, int64_t tokens, void* stream) {
  if (tokens == 0 || args.row_bytes == 0) return 0;
  const int bytes = access_bytes(
      {address(args.weight), address(args.out), args.row_bytes, args.weight_stride, args.out_stride});
  const int x = int(std::min<int64_t>(args.row_bytes / bytes, kThreads)), y = kThreads / x;
  dispatch_access(bytes, [&](auto access) {
    embedding_kernel<decltype(access)>
        <<<grid_size(ceil_div<int64_t>(tokens, y)), dim3(x, y), 0, cudaStream_t(stream)>>>(args, tokens);
  });
  return launch_result();
}

}  // namespace pelton::gpu
