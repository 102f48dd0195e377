// Gated activations on the GPU: act(gate) * up for SiLU and both forms of GELU.
// Threads side by side work on a row, several short rows a block; 16 bytes an access where everything is
// aligned to that. Method: Shazeer, "GLU Variants Improve Transformer", 2020.
#include "../common/gpu.cuh"
#include "activation.h"

namespace pelton::gpu {
namespace {

constexpr int kThreads = 256;

struct Silu {
  __device__ __forceinline__ float operator()(float x) const {
    // For a very negative x the exponential is infinite and the quotient 0.
    return divide(x, 1.f + exponential(-x));
  }
};

struct GeluTanh {
  __device__ __forceinline__ float operator()(float x) const {
    // 0.5 x (1 + tanh u) = x / (1 + e^-2u), which keeps its relative precision where tanh u is near -1.
    return divide(x, 1.f + exponential(x * fmaf(x * x, 0.044715f, 1.f) * -1.59576912f));
  }
};

// x times the normal distribution function, by the tail's polynomial of cpu.cpp, which says where it is from.
struct GeluErf {
  __device__ __forceinline__ float operator()(float x) const {
    const float s = fminf(fabsf(x), 15.f);  // there the tail is 0
    const float reciprocal = divide(1.f, s + 4.f), t = (s - 4.f) * reciprocal;
    float p = -1.317516235e-04f;
    p = fmaf(p, t, 1.804945744e-04f);
    p = fmaf(p, t, 1.571447872e-03f);
    p = fmaf(p, t, -3.512326967e-03f);
    p = fmaf(p, t, -7.525951552e-03f);
    p = fmaf(p, t, 6.040357436e-02f);
    p = fmaf(p, t, -1.865233616e-01f);
    p = fmaf(p, t, 3.871369334e-01f);
    p = fmaf(p, t, -6.078965906e-01f);
    p = fmaf(p, t, 7.552851349e-01f);
    // s^2 is rounded, and e^(-s^2/2) would magnify that: put the part that was lost back in.
    const float square = s * s, lost = fmaf(s, s, -square);
    const float tail = p * reciprocal * (expf(square * -0.5f) * fmaf(lost, -0.5f, 1.f));
    return x * (x < 0 ? tail : 1.f - tail);
  }
};

template <class T, int N, class F>
__global__ void __launch_bounds__(kThreads)
    gated_kernel(const GatedActivationArgs a, int64_t count, Divisor vectors_per_row, F activation) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  int64_t column;
  const int64_t row = vectors_per_row.divide(i, column);
  const T* from = static_cast<const T*>(a.x) + row * a.x_stride + column * N;
  const auto gate = Packed<T, N>::load(from), up = Packed<T, N>::load(from + a.width);
  float result[N];
#pragma unroll
  for (int k = 0; k < N; ++k) result[k] = activation(gate[k]) * up[k];
  Packed<T, N>::rounded(result).store(static_cast<T*>(a.out) + row * a.out_stride + column * N);
}

template <class T, int N, class F>
void launch(const GatedActivationArgs& a, int64_t rows, F activation, cudaStream_t stream) {
  const int64_t vectors_per_row = a.width / N, count = rows * vectors_per_row;
  gated_kernel<T, N, F><<<grid_size(ceil_div<int64_t>(count, kThreads)), kThreads, 0, stream>>>(
      a, count, Divisor(vectors_per_row), activation);
}

template <class T, class F>
void run(const GatedActivationArgs& a, int64_t rows, F activation, cudaStream_t stream) {
  constexpr int64_t kBytes = sizeof(T);
  if (access_bytes({address(a.x), address(a.out), a.width * kBytes, a.x_stride * kBytes,
                    a.out_stride * kBytes}) == 16) {
    launch<T, kVectorWidth<T>>(a, rows, activation, stream);
  } else {
    launch<T, 1>(a, rows, activation, stream);
  }
}

}  // namespace

int activation_and_mul(const GatedActivationArgs& args, int64_t rows, void* stream) {
  if (rows == 0 || args.width == 0) return 0;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    switch (args.activation) {
      case Activation::silu:
        return run<T>(args, rows, Silu{}, cudaStream_t(stream));
      case Activation::gelu_erf:
        return run<T>(args, rows, GeluErf{}, cudaStream_t(stream));
      case Activation::gelu_tanh:
        return run<T>(args, rows, GeluTanh{}, cudaStream_t(stream));
    }
  });
  return launch_result();
}

}  // namespace pelton::gpu
