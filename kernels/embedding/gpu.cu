// Token embedding on the GPU: row ids[t] of the weight becomes row t of the output, zeros where ids[t] is
// none. One access a thread, as wide as addresses and sizes allow. Source: none needed.
#include "../common/gpu.cuh"
#include "embedding.h"

namespace pelton::gpu {
namespace {

constexpr int kThreads = 256;

template <class Access>
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const EmbeddingArgs a, int64_t count, Divisor accesses_per_row) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  int64_t column;
  const int64_t token = accesses_per_row.divide(i, column);
  const int64_t id = a.ids[token];
  Access part = {};
  if (uint64_t(id) < uint64_t(a.vocabulary)) {
    part = reinterpret_cast<const Access*>(static_cast<const char*>(a.weight) + id * a.weight_stride)[column];
  }
  reinterpret_cast<Access*>(static_cast<char*>(a.out) + token * a.out_stride)[column] = part;
}

}  // namespace

int embedding(const EmbeddingArgs& args, int64_t tokens, void* stream) {
  if (tokens == 0 || args.row_bytes == 0) return 0;
  const int bytes = access_bytes(
      {address(args.weight), address(args.out), args.row_bytes, args.weight_stride, args.out_stride});
  const int64_t accesses_per_row = args.row_bytes / bytes, count = tokens * accesses_per_row;
  dispatch_access(bytes, [&](auto access) {
    embedding_kernel<decltype(access)>
        <<<grid_size(ceil_div<int64_t>(count, kThreads)), kThreads, 0, cudaStream_t(stream)>>>(
            args, count, Divisor(accesses_per_row));
  });
  return launch_result();
}

}  // namespace pelton::gpu
