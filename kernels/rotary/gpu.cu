// Rotary position embedding on the GPU, in place; a token whose position is not in the table stays as it is.
// A thread keeps the angles of a few pairs and turns these pairs in several heads; threads go over the pairs
// of a head (x), the heads (y) and tokens (z). Method: Su et al., "RoFormer", 2021.
#include "../common/gpu.cuh"
#include "rotary.h"

namespace pelton::gpu {
namespace {

constexpr int kThreads = 256;

// Turns N pairs of head x. The pairs begin at element `first` of either half, or at 2 * first when
// interleaved.
template <bool kInterleaved, class T, int N>
struct Pairs {
  Vector<T, N> part[2];

  __device__ __forceinline__ void load(const T* x, int first, int half) {
    part[0] = load_vector<T, N>(x + (kInterleaved ? 2 * first : first));
    part[1] = load_vector<T, N>(x + (kInterleaved ? 2 * first + N : first + half));
  }
  __device__ __forceinline__ T& element(int pair, int which) {
    return kInterleaved ? part[(2 * pair + which) / N][(2 * pair + which) % N] : part[which][pair];
  }
  __device__ __forceinline__ void turn(const float (&cos)[N], const float (&sin)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float a = to_float(element(i, 0)), b = to_float(element(i, 1));
      element(i, 0) = from_float<T>(a * cos[i] - b * sin[i]);
      element(i, 1) = from_float<T>(b * cos[i] + a * sin[i]);
    }
  }
  __device__ __forceinline__ void store(T* x, int first, int half) const {
    store_vector(x + (kInterleaved ? 2 * first : first), part[0]);
    store_vector(x + (kInterleaved ? 2 * first + N : first + half), part[1]);
  }
};

template <class T, int N, bool kInterleaved, int kHeads>
__global__ void __launch_bounds__(kThreads) rotary_kernel(const RotaryArgs a, int64_t tokens) {
  const int half = int(a.rotary_dim / 2);
  const int64_t heads = a.query.heads + a.key.heads;
  for (int64_t token = int64_t(blockIdx.x) * blockDim.z + threadIdx.z; token < tokens;
       token += int64_t(gridDim.x) * blockDim.z) {
    const int64_t position = a.positions[token];
    if (uint64_t(position) >= uint64_t(a.max_position)) continue;
    const float* angles = a.cos_sin_cache + position * a.rotary_dim;
    T* query = static_cast<T*>(a.query.data) + token * a.query.token_stride;
    T* key = static_cast<T*>(a.key.data) + token * a.key.token_stride;
    for (int first = threadIdx.x * N; first < half; first += blockDim.x * N) {
      float cos[N], sin[N];
      constexpr int kAngles = N < 4 ? N : 4;
#pragma unroll
      for (int i = 0; i < N; i += kAngles) {
        const auto c = load_vector<float, kAngles>(angles + first + i);
        const auto s = load_vector<float, kAngles>(angles + half + first + i);
#pragma unroll
        for (int j = 0; j < kAngles; ++j) cos[i + j] = c[j], sin[i + j] = s[j];
      }
      for (int64_t start = threadIdx.y; start < heads; start += kHeads * blockDim.y) {
        Pairs<kInterleaved, T, N> pairs[kHeads];
        T* x[kHeads];
#pragma unroll
        for (int k = 0; k < kHeads; ++k) {
          const int64_t head = start + k * blockDim.y;
          x[k] = head < a.query.heads ? query + head * a.query.head_stride
                                      : key + (head - a.query.heads) * a.key.head_stride;
          if (head < heads) pairs[k].load(x[k], first, half);
        }
#pragma unroll
        for (int k = 0; k < kHeads; ++k) {
          if (start + k * blockDim.y >= heads) continue;
          pairs[k].turn(cos, sin);
          pairs[k].store(x[k], first, half);
        }
      }
    }
  }
}

template <class T, int N, int kHeads>
void run(const RotaryArgs& a, int64_t tokens, cudaStream_t stream) {
  const int64_t heads = a.query.heads + a.key.heads;
  const int x = int(std::min<int64_t>(ceil_div<int64_t>(a.rotary_dim / 2, N), kThreads));
  const int y = int(std::min<int64_t>(ceil_div<int64_t>(heads, kHeads), kThreads / x));
  const int z = std::min(kThreads / (x * y), 64);
  const dim3 block(x, y, z);
  const unsigned grid = grid_size(ceil_div<int64_t>(tokens, z));
  if (a.interleaved) {
    rotary_kernel<T, N, true, kHeads><<<grid, block, 0, stream>>>(a, tokens);
  } else {
    rotary_kernel<T, N, false, kHeads><<<grid, block, 0, stream>>>(a, tokens);
  }
}

}  // namespace

int rotary_embedding(const RotaryArgs& a, int64_t tokens, void* stream) {
  if (tokens == 0 || a.rotary_dim == 0 || a.query.heads + a.key.heads == 0) return 0;
  dispatch(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t kBytes = sizeof(T);
    const int bytes = access_bytes({address(a.query.data), address(a.key.data), a.rotary_dim / 2 * kBytes,
                                    a.query.token_stride * kBytes, a.query.head_stride * kBytes,
                                    a.key.token_stride * kBytes, a.key.head_stride * kBytes});
    const bool wide = bytes == 16 && is_aligned16(a.cos_sin_cache);
    if (wide) {
      run<T, kVectorWidth<T>, 4>(a, tokens, cudaStream_t(stream));
    } else {
      run<T, 1, 4>(a, tokens, cudaStream_t(stream));
    }
  });
  return launch_result();
}

}  // namespace pelton::gpu
