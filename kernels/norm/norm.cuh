// RMS normalization on the GPU, alone (gpu.cu) and fused with the residual addition before it (gpu_fused.cu).
// A row stays in the registers of its threads between the sum of squares and the scaling: lanes of a warp for
// narrow rows, a block for wide ones; rows beyond that are read twice. Sums are kept in fp32, with scaled
// values where squares overflow. Method: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
#pragma once
#include "../common/gpu.cuh"
#include "norm.h"

namespace pelton::gpu::norm {

// Both operators; the fused one stores x plus the residual to the residual and goes on with that.
struct NormArgs {
  void* out;
  const void* x;
  void* residual;  // null: there is none
  const void* weight;
  int64_t width, residual_stride;
  DeviceRows x_rows, out_rows;
  float eps;
};

// A power of two that brings the square of every fp32 value back into fp32's range.
constexpr float kTiny = 0x1p-100f;

// Sum over the Threads threads of a row, the same result in each of them.
template <int Threads>
__device__ __forceinline__ float row_sum(float v) {
  if constexpr (Threads <= kWarp) {
    return warp_sum<Threads>(v);
  } else {
    return block_sum<Threads>(v);
  }
}

// 1 / sqrt(mean of squares + eps) of a row. `squares(scale)` gives this thread's share of the sum of squares
// of scaled values.
template <int Threads, class Squares>
__device__ __forceinline__ float inverse_rms(const NormArgs& a, Squares&& squares) {
  const float sum = row_sum<Threads>(squares(1.f));
  const float scale = rsqrtf(sum / float(a.width) + a.eps);
  // Squares of bf16 and fp32 values can leave the range of fp32 although the result is finite.
  bool overflow = !is_finite(sum);
  if constexpr (Threads < kWarp) overflow = warp_any(overflow);  // all lanes add together
  if (!overflow) return scale;
  const float scaled = row_sum<Threads>(squares(kTiny));
  return is_finite(sum) ? scale : rsqrtf(scaled / float(a.width)) * kTiny;
}

template <class T, int N>
__device__ __forceinline__ float sum_of_squares(const Packed<T, N>& v, float scale) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float x = v[i] * scale;
    sum = fmaf(x, x, sum);
  }
  return sum;
}

template <class T, int N>
__device__ __forceinline__ Packed<T, N> added(const Packed<T, N>& x, const Packed<T, N>& residual) {
  float sum[N];
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = x[i] + residual[i];
  return Packed<T, N>::rounded(sum);
}

template <class T, int N>
__device__ __forceinline__ Packed<T, N> normalized(const Packed<T, N>& x, float scale,
                                                   const Packed<T, N>& weight) {
  float out[N];
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = x[i] * scale * weight[i];
  return Packed<T, N>::rounded(out);
}

// Rows a block, when a row has this many threads.
template <int Threads>
constexpr int kRowsPerBlock = Threads <= kWarp ? 128 / Threads : 1;

// Rows of at most Threads * Items vectors. EarlyWeight: the weight is loaded with the row, which takes more
// registers and waits once instead of twice. KeepInput: the caches give up the rows last.
template <class T, int N, int Threads, int Items, bool Add, bool EarlyWeight, bool KeepInput>
__global__ void __launch_bounds__(Threads* kRowsPerBlock<Threads>)
    norm_kernel(const NormArgs a, int64_t first_row, int64_t rows) {
  const int vectors = int(a.width / N);
  const int64_t row = first_row + int64_t(blockIdx.x) * kRowsPerBlock<Threads> + threadIdx.y;
  const bool active = kRowsPerBlock<Threads> == 1 || row < rows;  // all lanes of a warp add together
  const T* x = static_cast<const T*>(a.x) + (active ? a.x_rows.offset(row) : 0);
  const T* weight = static_cast<const T*>(a.weight);
  T* residual = static_cast<T*>(a.residual) + row * a.residual_stride;
  Packed<T, N> v[Items] = {}, old[Items], w[Items];
#pragma unroll
  for (int k = 0; k < Items; ++k) {
    const int i = threadIdx.x + k * Threads;
    if (!active || i >= vectors) continue;
    if constexpr (KeepInput) {
      v[k].words = load_vector_kept(reinterpret_cast<const uint32_t*>(x + i * N));
    } else {
      v[k] = Packed<T, N>::load(x + i * N);
    }
    if constexpr (Add) old[k] = Packed<T, N>::load(residual + i * N);
  }
  if constexpr (EarlyWeight) {
#pragma unroll
    for (int k = 0; k < Items; ++k) {
      const int i = threadIdx.x + k * Threads;
      if (i < vectors) w[k] = Packed<T, N>::load(weight + i * N);
    }
  }
  if constexpr (Add) {
#pragma unroll
    for (int k = 0; k < Items; ++k) {
      const int i = threadIdx.x + k * Threads;
      if (!active || i >= vectors) continue;
      v[k] = added(v[k], old[k]);
      v[k].store(residual + i * N);
    }
  }
  const float scale = inverse_rms<Threads>(a, [&](float factor) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < Items; ++k) {
      v[k].forget();
      sum += sum_of_squares(v[k], factor);
    }
    return sum;
  });
  T* out = static_cast<T*>(a.out) + (active ? a.out_rows.offset(row) : 0);
#pragma unroll
  for (int k = 0; k < Items; ++k) {
    const int i = threadIdx.x + k * Threads;
    if (!active || i >= vectors) continue;
    if constexpr (!EarlyWeight) w[k] = Packed<T, N>::load(weight + i * N);
    v[k].forget();
    normalized(v[k], scale, w[k]).store(out + i * N);
  }
}

// Rows of any width, one a block, read twice.
template <class T, int N, int Threads, bool Add>
__global__ void __launch_bounds__(Threads) wide_norm_kernel(const NormArgs a) {
  constexpr int64_t kStep = Threads * N;
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(a.x) + a.x_rows.offset(row);
  const T* weight = static_cast<const T*>(a.weight);
  T* residual = static_cast<T*>(a.residual) + row * a.residual_stride;
  T* out = static_cast<T*>(a.out) + a.out_rows.offset(row);
  float scale = 0;
  for (float factor = 1;; factor = kTiny) {  // the second time where squares leave the range of fp32
    float sum = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x * N; i < a.width; i += kStep) {
      auto v = Packed<T, N>::load(x + i);
      if constexpr (Add) {
        if (factor == 1) {
          v = added(v, Packed<T, N>::load(residual + i));
          v.store(residual + i);
        }
      }
      sum += sum_of_squares(v, factor);
    }
    if constexpr (Add) x = residual;  // from now on; a thread reads again what it wrote itself
    sum = block_sum<Threads>(sum);
    scale = rsqrtf(sum / float(a.width) + (factor == 1 ? a.eps : 0)) * factor;
    if (factor != 1 || is_finite(sum)) break;
  }
#pragma unroll 4
  for (int64_t i = threadIdx.x * N; i < a.width; i += kStep) {
    normalized(Packed<T, N>::load(x + i), scale, Packed<T, N>::load(weight + i)).store(out + i);
  }
}

template <class T, int N, int Threads, int Items, bool Add, bool EarlyWeight = true, bool KeepInput = false>
void launch_rows(const NormArgs& a, int64_t rows, cudaStream_t stream) {
  constexpr int kRows = kRowsPerBlock<Threads>;
  for (int64_t first = 0; first < rows; first += kMaxBlocks * kRows) {
    const int64_t blocks = std::min(kMaxBlocks, ceil_div<int64_t>(rows - first, kRows));
    norm_kernel<T, N, Threads, Items, Add, EarlyWeight, KeepInput>
        <<<unsigned(blocks), dim3(Threads, kRows), 0, stream>>>(a, first, rows);
  }
}

template <class T, int N, bool Add>
void run_rows(const NormArgs& a, int64_t rows, cudaStream_t stream) {
  const int64_t vectors = a.width / N;
  if constexpr (N == 1) {  // rare: fewer kernels to build
    if (vectors <= 128) return launch_rows<T, N, 32, 4, Add>(a, rows, stream);
    if (vectors <= 1024) return launch_rows<T, N, 256, 4, Add>(a, rows, stream);
  } else {
    if (vectors <= 8) return launch_rows<T, N, 8, 1, Add>(a, rows, stream);
    if (vectors <= 16) return launch_rows<T, N, 16, 1, Add>(a, rows, stream);
    if (vectors <= 32) return launch_rows<T, N, 32, 1, Add>(a, rows, stream);
    if (vectors <= 64) return launch_rows<T, N, 64, 1, Add>(a, rows, stream);
    if (vectors <= 128) return launch_rows<T, N, 64, 2, Add>(a, rows, stream);
    if (vectors <= 256) return launch_rows<T, N, 128, 2, Add>(a, rows, stream);
    if (vectors <= 512) return launch_rows<T, N, 256, 2, Add>(a, rows, stream);
    if constexpr (!Add) {
      // Rows that no cache holds all of are done soonest when their lines do not make way for one another.
      constexpr int64_t kMoreThanCached = 128 << 20;
      if (vectors > 512 && vectors <= 1024 && rows * a.width * int64_t(sizeof(T)) > kMoreThanCached) {
        return launch_rows<T, N, 128, 8, Add, true, true>(a, rows, stream);
      }
    }
    if (vectors <= 1024) return launch_rows<T, N, 256, 4, Add>(a, rows, stream);
    if (vectors <= 2048) return launch_rows<T, N, 512, 4, Add>(a, rows, stream);
    if (vectors <= 4096) return launch_rows<T, N, 512, 8, Add, false>(a, rows, stream);
    if (vectors <= 8192) return launch_rows<T, N, 1024, 8, Add, false>(a, rows, stream);
  }
  wide_norm_kernel<T, N, 512, Add><<<grid_size(rows), 512, 0, stream>>>(a);
}

// Both operators' launch.
template <bool Add>
int run(const NormArgs& a, DType dtype, int64_t rows, void* stream) {
  if (rows == 0 || a.width == 0) return 0;
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t kBytes = sizeof(T);
    const bool wide =
        access_bytes({address(a.x), address(a.out), address(a.residual), address(a.weight), a.width * kBytes,
                      a.residual_stride * kBytes, a.x_rows.stride * kBytes, a.x_rows.group_stride * kBytes,
                      a.out_rows.stride * kBytes, a.out_rows.group_stride * kBytes}) == 16;
    if (wide) {
      run_rows<T, kVectorWidth<T>, Add>(a, rows, cudaStream_t(stream));
    } else {
      run_rows<T, 1, Add>(a, rows, cudaStream_t(stream));
    }
  });
  return launch_result();
}

}  // namespace pelton::gpu::norm
