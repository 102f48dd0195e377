// From products of queries and keys to weights, for kernels with matrix instructions.
#pragma once
#include "../common/mma.cuh"
#include "batch.cuh"

namespace pelton::gpu {

#if defined(__HIP_PLATFORM_AMD__) && !defined(PELTON_EMULATION)
// 2^x to one unit in the last place; results below 2^-126 are zero.
__device__ __forceinline__ float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
#endif

// Whether one of the two half-precision values is infinite or NaN.
template <class T>
__device__ __forceinline__ bool any_not_finite(uint32_t pair) {
  constexpr uint32_t kExponent = T::is_bf16 ? 0x7f80u : 0x7c00u;
  return (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
}

// Scores from products of query and key: weights are exp2(unit * score).
struct Scores {
  float unit, factor, cap;  // cap 0: the score is the product itself
  bool direct;

  __device__ explicit Scores(const AttentionArgs& a) {
    direct = a.soft_cap == 0 && a.scale > 0;  // a larger product has the larger weight
    unit = direct ? a.scale * kLog2e : 1;
    cap = a.soft_cap * kLog2e;
    factor = cap > 0 ? a.scale / a.soft_cap * (2 * kLog2e) : a.scale * kLog2e;
  }
  __device__ float operator()(float product) const {
    // tanh(x) = 1 - 2 / (exp(2 x) + 1)
    return cap > 0 ? cap - divide(2 * cap, exp2_fast(product * factor) + 1) : product * factor;
  }
};

}  // namespace pelton::gpu
