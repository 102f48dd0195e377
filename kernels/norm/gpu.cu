// RMS normalization on the GPU, alone and fused with the residual addition before it.
// A row stays in the registers of its threads between the sum of squares and the scaling: lanes of a warp for
// narrow rows, a block for wide ones; rows beyond that are read twice. Sums are kept in fp32, with scaled
// values where squares overflow. Method: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
#include "../common/gpu.cuh"
#include "norm.h"

namespace pelton::gpu {
namespace {

// Both operators: `sum` is x, or x plus the residual, which is then stored to the residual.
struct NormArgs {
  void* out;
  const void* x;
  void* residual;  // null: there is none
  const void* weight;
  int64_t width, residual_stride;
  RowLayout x_rows, out_rows;
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
__device__ __forceinline__ float sum_of_squares(const Vector<T, N>& v, float scale) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float x = to_float(v[i]) * scale;
    sum = fmaf(x, x, sum);
  }
  return sum;
}

template <class T, int N>
__device__ __forceinline__ Vector<T, N> added(const Vector<T, N>& x, const Vector<T, N>& residual) {
  Vector<T, N> sum;
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = from_float<T>(to_float(x[i]) + to_float(residual[i]));
  return sum;
}

template <class T, int N>
__device__ __forceinline__ Vector<T, N> scaled(const Vector<T, N>& x, float scale,
                                               const Vector<T, N>& weight) {
  Vector<T, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = from_float<T>(to_float(x[i]) * scale * to_float(weight[i]));
  return out;
}

// Rows of at most Threads * Items accesses of N elements; blockDim.y rows a block, 1 when Threads exceed a
// warp.
template <class T, int N, int Threads, int Items, bool Add>
__global__ void norm_kernel(const NormArgs a, int64_t rows) {
  const int items = int(a.width / N);
  const T* weight = static_cast<const T*>(a.weight);
  for (int64_t base = int64_t(blockIdx.x) * blockDim.y; base < rows;
       base += int64_t(gridDim.x) * blockDim.y) {
    const int64_t row = base + threadIdx.y;
    const bool active = row < rows;
    const T* x = static_cast<const T*>(a.x) + (active ? a.x_rows.offset(row) : 0);
    T* residual = static_cast<T*>(a.residual) + row * a.residual_stride;
    T* out = static_cast<T*>(a.out) + (active ? a.out_rows.offset(row) : 0);
    Vector<T, N> v[Items] = {}, added_to[Items], w[Items];
#pragma unroll
    for (int k = 0; k < Items; ++k) {
      const int item = threadIdx.x + k * Threads;
      if (!active || item >= items) continue;
      v[k] = load_vector<T, N>(x + item * N);
      if constexpr (Add) added_to[k] = load_vector<T, N>(residual + item * N);
    }
#pragma unroll
    for (int k = 0; k < Items; ++k) {
      const int item = threadIdx.x + k * Threads;
      if (item < items) w[k] = load_vector<T, N>(weight + item * N);
    }
    if constexpr (Add) {
#pragma unroll
      for (int k = 0; k < Items; ++k) {
        const int item = threadIdx.x + k * Threads;
        if (!active || item >= items) continue;
        v[k] = added(v[k], added_to[k]);
        store_vector(residual + item * N, v[k]);
      }
    }
    const float scale = inverse_rms<Threads>(a, [&](float factor) {
      float sum = 0;
#pragma unroll
      for (int k = 0; k < Items; ++k) sum += sum_of_squares(v[k], factor);
      return sum;
    });
#pragma unroll
    for (int k = 0; k < Items; ++k) {
      const int item = threadIdx.x + k * Threads;
      if (active && item < items) store_vector(out + item * N, scaled(v[k], scale, w[k]));
    }
  }
}

// Rows of any width, one a block.
template <class T, int N, int Threads, bool Add>
__global__ void __launch_bounds__(Threads) wide_norm_kernel(const NormArgs a, int64_t rows) {
  const int64_t step = Threads * N;
  const T* weight = static_cast<const T*>(a.weight);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.x) + a.x_rows.offset(row);
    T* residual = static_cast<T*>(a.residual) + row * a.residual_stride;
    T* out = static_cast<T*>(a.out) + a.out_rows.offset(row);
    if constexpr (Add) {
      for (int64_t i = threadIdx.x * N; i < a.width; i += step) {
        store_vector(residual + i, added(load_vector<T, N>(x + i), load_vector<T, N>(residual + i)));
      }
      x = residual;  // a thread reads again what it wrote itself
    }
    const float scale = inverse_rms<Threads>(a, [&](float factor) {
      float sum = 0;
#pragma unroll 4
      for (int64_t i = threadIdx.x * N; i < a.width; i += step) {
        sum += sum_of_squares(load_vector<T, N>(x + i), factor);
      }
      return sum;
    });
#pragma unroll 4
    for (int64_t i = threadIdx.x * N; i < a.width; i += step) {
      store_vector(out + i, scaled(load_vector<T, N>(x + i), scale, load_vector<T, N>(weight + i)));
    }
  }
}

template <class T, int N, int Threads, int Items, bool Add>
void launch_rows(const NormArgs& a, int64_t rows, cudaStream_t stream) {
  constexpr int kRows = rows_per_block(Threads);
  norm_kernel<T, N, Threads, Items, Add>
      <<<grid_size(ceil_div<int64_t>(rows, kRows)), dim3(Threads, kRows), 0, stream>>>(a, rows);
}

template <class T, int N, bool Add>
void run_rows(const NormArgs& a, int64_t rows, cudaStream_t stream) {
  const int64_t items = a.width / N;
  if constexpr (N == 1) {  // rare: fewer kernels to build
    if (items <= 128) return launch_rows<T, N, 32, 4, Add>(a, rows, stream);
    if (items <= 1024) return launch_rows<T, N, 256, 4, Add>(a, rows, stream);
    if (items <= 4096) return launch_rows<T, N, 1024, 4, Add>(a, rows, stream);
  } else {
    if (items <= 8) return launch_rows<T, N, 8, 1, Add>(a, rows, stream);
    if (items <= 16) return launch_rows<T, N, 16, 1, Add>(a, rows, stream);
    if (items <= 32) return launch_rows<T, N, 32, 1, Add>(a, rows, stream);
    if (items <= 64) return launch_rows<T, N, 32, 2, Add>(a, rows, stream);
    if (items <= 128) return launch_rows<T, N, 32, 4, Add>(a, rows, stream);
    if (items <= 256) return launch_rows<T, N, 128, 2, Add>(a, rows, stream);
    if (items <= 512) return launch_rows<T, N, 256, 2, Add>(a, rows, stream);
    if (items <= 1024) return launch_rows<T, N, 256, 4, Add>(a, rows, stream);
    if (items <= 2048) return launch_rows<T, N, 512, 4, Add>(a, rows, stream);
    if (items <= 4096) return launch_rows<T, N, 1024, 4, Add>(a, rows, stream);
  }
  wide_norm_kernel<T, N, 512, Add><<<grid_size(rows), 512, 0, stream>>>(a, rows);
}

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

}  // namespace

int rms_norm(const RmsNormArgs& a, int64_t rows, void* stream) {
  return run<false>({a.out, a.x, nullptr, a.weight, a.width, 0, a.x_rows, a.out_rows, a.eps}, a.dtype, rows,
                    stream);
}

int fused_add_rms_norm(const FusedAddRmsNormArgs& a, int64_t rows, void* stream) {
  const RowLayout x_rows{rows, a.x_stride, 0};
  return run<true>({a.x, a.x, a.residual, a.weight, a.width, a.residual_stride, x_rows, x_rows, a.eps},
                   a.dtype, rows, stream);
}

}  // namespace pelton::gpu
