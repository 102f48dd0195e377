// The choice between the kernels of gemm.cuh and narrow.cuh.
#pragma once
#include "gemm.cuh"
#include "narrow.cuh"

namespace pelton::gpu::marlin {

template <class T, int Bits, class F>
auto with_narrow_shape(int64_t m, F&& f) {
  return m <= 8 ? f(NarrowShape<T, Bits, 1>{}) : f(NarrowShape<T, Bits, 2>{});
}

template <class T, int Bits>
int product(const MarlinGemmArgs& a, cudaStream_t stream) {
  if (narrow_fits(a)) {
    bool started = false;
    const int error = with_narrow_shape<T, Bits>(
        a.m, [&](auto shape) { return start_narrow<decltype(shape)>(a, stream, started); });
    if (started) return error;
  }
  return with_shape<T, Bits>(a.m, [&](auto shape) { return start_gemm<decltype(shape)>(a, stream); });
}

// Of the largest that any of the kernels needs, whatever the dtype and the number of bits.
template <int Bits>
int64_t workspace_of(const MarlinGemmArgs& a) {
  int64_t size =
      with_shape<f16, Bits>(a.m, [&](auto shape) { return gemm_workspace<decltype(shape)>(a.m, a.n, a.k); });
  if (narrow_fits(a)) {
    size = std::max(size, with_narrow_shape<f16, Bits>(
                              a.m, [&](auto shape) { return narrow_workspace<decltype(shape)>(a); }));
  }
  return size;
}

}  // namespace pelton::gpu::marlin
