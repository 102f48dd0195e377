// RMS normalization on the GPU: the operator that adds the residual first. norm.cuh has the kernels.
#include "norm.cuh"

namespace pelton::gpu {

int fused_add_rms_norm(const FusedAddRmsNormArgs& a, int64_t rows, void* stream) {
  const DeviceRows x_rows(RowLayout{rows, a.x_stride, 0});
  return norm::run<true>({a.x, a.x, a.residual, a.weight, a.width, a.residual_stride, x_rows, x_rows, a.eps},
                         a.dtype, rows, stream);
}

}  // namespace pelton::gpu
