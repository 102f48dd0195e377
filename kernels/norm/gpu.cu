#include "../common/gpu.cuh"
#include "norm.h"

namespace pelton::gpu {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void rms_norm_kernel(const RmsNormArgs args) {
  const T* x = static_cast<const T*>(args.x) + args.x_rows.offset(blockIdx.x);
  const T* weight = static_cast<const T*>(args.weight);
  T* out = static_cast<T*>(args.out) + args.out_rows.offset(blockIdx.x);
  float sum = 0;
  for (int64_t i = threadIdx.x; i < args.width; i += kThreads) {
    const float v = to_float(x[i]);
    sum += v * v;
  }
  const float scale = rsqrtf(block_sum<kThreads>(sum) / float(args.width) + args.eps);
  for (int64_t i = threadIdx.x; i < args.width; i += kThreads) {
    out[i] = from_float<T>(to_float(x[i]) * scale * to_float(weight[i]));
  }
}

template <class T>
__global__ void fused_add_rms_norm_kernel(const FusedAddRmsNormArgs args) {
  T* x = static_cast<T*>(args.x) + blockIdx.x * args.x_stride;
  T* residual = static_cast<T*>(args.residual) + blockIdx.x * args.residual_stride;
  const T* weight = static_cast<const T*>(args.weight);
  float sum = 0;
  for (int64_t i = threadIdx.x; i < args.width; i += kThreads) {
    residual[i] = from_float<T>(to_float(x[i]) + to_float(residual[i]));
    const float v = to_float(residual[i]);
    sum += v * v;
  }
  const float scale = rsqrtf(block_sum<kThreads>(sum) / float(args.width) + args.eps);
  for (int64_t i = threadIdx.x; i < args.width; i += kThreads) {
    x[i] = from_float<T>(to_float(residual[i]) * scale * to_float(weight[i]));
  }
}

}  // namespace

int rms_norm(const RmsNormArgs& args, int64_t rows, void* stream) {
  if (rows == 0 || args.width == 0) return 0;
  dispatch(args.dtype, [&](auto zero) {
    rms_norm_kernel<decltype(zero)><<<unsigned(rows), kThreads, 0, cudaStream_t(stream)>>>(args);
  });
  return launch_result();
}

int fused_add_rms_norm(const FusedAddRmsNormArgs& args, int64_t rows, void* stream) {
  if (rows == 0 || args.width == 0) return 0;
  dispatch(args.dtype, [&](auto zero) {
    fused_add_rms_norm_kernel<decltype(zero)><<<unsigned(rows), kThreads, 0, cudaStream_t(stream)>>>(args);
  });
  return launch_result();
}

}  // namespace pelton::gpu
