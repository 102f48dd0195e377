// Element types that kernels know, without torch.
#pragma once
#include <cstdint>

namespace pelton {

enum class DType : int { f32, f16, bf16 };

// Storage of the half-precision types; arithmetic is always done in fp32.
struct f16 {
  static constexpr bool is_bf16 = false;
  uint16_t bits;
};
struct bf16 {
  static constexpr bool is_bf16 = true;
  uint16_t bits;
};

// Calls f with a value of the C++ type that stands for `dtype`: f(float{}), f(f16{}) or f(bf16{}).
template <class F>
inline void dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::f16:
      return f(f16{});
    case DType::bf16:
      return f(bf16{});
  }
}

}  // namespace pelton
