// Rotary position embedding on the GPU, in place; a token whose position is not in the table stays as it is.
// A thread keeps the angles of a few pairs and turns these pairs in several heads; threads go over the pairs
// of a head (x), the heads (y) and tokens (z). Method: Su et al., "RoFormer", 2021.
#include "../common/gpu.cuh"
#include "rotary.h"

namespace pelton::gpu {
namespace {

constexpr int kMaxThreads = 256;
// With fewer tokens than these, all heads of a token are under way together.
constexpr int64_t kManyTokens = 1024;

// N pairs of a head in two vectors: the first elements in one and the second in the other, or neighbours of
// the same vector when interleaved. (One pair in two vectors of one element is the same either way.)
template <class T, int N, bool kInterleaved>
struct Pairs {
  static constexpr bool kNeighbours = kInterleaved && N > 1;
  Packed<T, N> part[2];

  __device__ __forceinline__ void load(const T* x, int64_t second) {
    part[0] = Packed<T, N>::load(x);
    part[1] = Packed<T, N>::load(x + second);
  }
  __device__ __forceinline__ void turn_and_store(T* x, int64_t second, const float (&cos)[N],
                                                 const float (&sin)[N]) const {
    float turned[2][N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int va = kNeighbours ? 2 * i / N : 0, vb = kNeighbours ? va : 1;
      const int ia = kNeighbours ? 2 * i % N : i, ib = kNeighbours ? ia + 1 : i;
      const float a = part[va][ia], b = part[vb][ib];
      turned[va][ia] = a * cos[i] - b * sin[i];
      turned[vb][ib] = b * cos[i] + a * sin[i];
    }
    Packed<T, N>::rounded(turned[0]).store(x);
    Packed<T, N>::rounded(turned[1]).store(x + second);
  }
};

// Angles of N pairs, one after the other, or the two halves of them `half / 2` pairs apart.
template <int N, bool kHalves>
__device__ __forceinline__ void load_angles(float (&to)[N], const float* from, int half) {
  constexpr int kRun = kHalves ? N / 2 : N, kAngles = kRun < 4 ? kRun : 4;
#pragma unroll
  for (int i = 0; i < N; i += kAngles) {
    const auto part = load_vector<float, kAngles>(from + (kHalves && i >= kRun ? half / 2 + i - kRun : i));
#pragma unroll
    for (int j = 0; j < kAngles; ++j) to[i + j] = part[j];
  }
}

// A thread has kHeads heads under way together.
template <class T, int N, bool kInterleaved, int kHeads>
__global__ void __launch_bounds__(kMaxThreads) rotary_kernel(const RotaryArgs a, int64_t tokens) {
  const int64_t token = int64_t(blockIdx.x) * blockDim.z + threadIdx.z;
  if (token >= tokens) return;
  const int half = int(a.rotary_dim / 2), query_heads = int(a.query.heads),
            heads = query_heads + int(a.key.heads);
  // The vectors of a thread lie half a head apart, or are one pair of neighbours.
  constexpr bool kNeighbours = Pairs<T, N, kInterleaved>::kNeighbours,
                 kOnePair = kInterleaved && !kNeighbours;
  const int64_t second = kOnePair ? 1 : half;
  T* query = static_cast<T*>(a.query.data) + token * a.query.token_stride;
  T* key = static_cast<T*>(a.key.data) + token * a.key.token_stride - query_heads * a.key.head_stride;
  const int64_t position = a.positions[token];
  const bool known = uint64_t(position) < uint64_t(a.max_position);
  for (int first = threadIdx.x * N; first < half; first += blockDim.x * N) {
    const int offset = kOnePair ? 2 * first : first;
    float cos[N], sin[N];
    for (int start = threadIdx.y; start < heads; start += kHeads * blockDim.y) {
      Pairs<T, N, kInterleaved> pairs[kHeads];
      T* x[kHeads];
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        const int head = start + k * blockDim.y;
        x[k] = (head < query_heads ? query + head * a.query.head_stride : key + head * a.key.head_stride) +
               offset;
        if (head < heads) pairs[k].load(x[k], second);
      }
      if (!known) break;
      if (start == threadIdx.y) {  // the heads' loads do not wait for the position's
        const float* angles = a.cos_sin_cache + position * a.rotary_dim + (kNeighbours ? first / 2 : first);
        load_angles<N, kNeighbours>(cos, angles, half);
        load_angles<N, kNeighbours>(sin, angles + half, half);
      }
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        if (start + k * blockDim.y < heads) pairs[k].turn_and_store(x[k], second, cos, sin);
      }
    }
  }
}

// Blocks of `threads` threads, of which at most `most` lie beside each other over the heads.
template <class T, int N, int kHeads>
void launch(const RotaryArgs& a, int64_t tokens, int threads, int most, cudaStream_t stream) {
  const int64_t heads = a.query.heads + a.key.heads;
  const int x = int(std::min<int64_t>(ceil_div<int64_t>(a.rotary_dim / 2, N), threads));
  const int y = int(std::min<int64_t>(ceil_div<int64_t>(heads, kHeads), std::min(most, threads / x)));
  const int z = std::min(threads / (x * y), 64);
  const dim3 block(x, y, z);
  const unsigned grid = grid_size(ceil_div<int64_t>(tokens, z));
  if (a.interleaved) {
    rotary_kernel<T, N, true, kHeads><<<grid, block, 0, stream>>>(a, tokens);
  } else {
    rotary_kernel<T, N, false, kHeads><<<grid, block, 0, stream>>>(a, tokens);
  }
}

// The measured best: several heads a thread where the vectors of a head leave lanes of a warp without a
// neighbour in the same line of memory.
template <class T, int N>
void launch(const RotaryArgs& a, int64_t tokens, cudaStream_t stream) {
  constexpr int kFewThreads = 128, kFewRows = 8;
  const bool many = tokens >= kManyTokens;
  if constexpr (N > 1) {
    const int64_t vectors = a.rotary_dim / 2 / N;
    if (many && (vectors & (vectors - 1)) == 0)
      return launch<T, N, 1>(a, tokens, kFewThreads, kFewRows, stream);
    if (many) return launch<T, N, 8>(a, tokens, kFewThreads, kFewRows, stream);
  }
  launch<T, N, 2>(a, tokens, kMaxThreads, many ? kFewRows : kMaxThreads, stream);
}

}  // namespace

int rotary_embedding(const RotaryArgs& a, int64_t tokens, void* stream) {
  if (tokens == 0 || a.rotary_dim == 0 || a.query.heads + a.key.heads == 0) return 0;
  dispatch(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t kBytes = sizeof(T);
    const bool wide = access_bytes({address(a.query.data), address(a.key.data), a.rotary_dim / 2 * kBytes,
                                    a.query.token_stride * kBytes, a.query.head_stride * kBytes,
                                    a.key.token_stride * kBytes, a.key.head_stride * kBytes}) == 16;
    if (wide && is_aligned16(a.cos_sin_cache)) {
      launch<T, kVectorWidth<T>>(a, tokens, cudaStream_t(stream));
    } else {
      launch<T, 1>(a, tokens, cudaStream_t(stream));
    }
  });
  return launch_result();
}

}  // namespace pelton::gpu
