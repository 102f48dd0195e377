// RMS normalization on the GPU: the operator without a residual. norm.cuh has the kernels.
#include "norm.cuh"

namespace pelton::gpu {

int rms_norm(const RmsNormArgs& a, int64_t rows, void* stream) {
  return norm::run<false>(
      {a.out, a.x, nullptr, a.weight, a.width, 0, DeviceRows(a.x_rows), DeviceRows(a.out_rows), a.eps},
      a.dtype, rows, stream);
}

}  // namespace pelton::gpu
