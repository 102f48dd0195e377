// RMS normalization, alone and fused with the residual addition before it.
// One thread works on whole rows; sums of squares are kept in fp32, or in fp64 where they overflow.
// Method: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
#include <cmath>

#include "../common/simd.h"
#include "norm.h"

namespace pelton::cpu {
namespace {

// 1 / sqrt(mean of squares + eps), given a way to read the row one vector at a time.
template <class Load>
float inverse_rms(int64_t width, float eps, Load&& load_at) {
  Vec squares = Vec::zero();
  for_each_vector(width, [&](int64_t i, int n, auto full) {
    const Vec v = load_at(i, n, full);
    squares = fma(v, v, squares);
  });
  const float total = sum(squares);
  if (std::isfinite(total)) return 1.f / std::sqrt(total / float(width) + eps);
  // Squares of bf16 and fp32 values can leave the range of fp32 although the result is finite.
  double wide = 0;
  for_each_vector(width, [&](int64_t i, int n, auto full) {
    float lane[Vec::width];
    store(lane, load_at(i, n, full));
    for (int k = 0; k < n; ++k) wide += double(lane[k]) * lane[k];
  });
  return float(1.0 / std::sqrt(wide / double(width) + eps));
}

template <class T>
void rms_norm_rows(const RmsNormArgs& a, int64_t first_row, int64_t last_row) {
  const T* weight = static_cast<const T*>(a.weight);
  for (int64_t row = first_row; row < last_row; ++row) {
    const T* x = static_cast<const T*>(a.x) + a.x_rows.offset(row);
    T* out = static_cast<T*>(a.out) + a.out_rows.offset(row);
    const auto load_x = [&](int64_t i, int n, auto full) { return load_step(x + i, n, full); };
    const Vec scale = Vec::set1(inverse_rms(a.width, a.eps, load_x));
    for_each_vector(a.width, [&](int64_t i, int n, auto full) {
      store_step(out + i, load_x(i, n, full) * scale * load_step(weight + i, n, full), n, full);
    });
  }
}

template <class T>
void fused_add_rms_norm_rows(const FusedAddRmsNormArgs& a, int64_t first_row, int64_t last_row) {
  const T* weight = static_cast<const T*>(a.weight);
  for (int64_t row = first_row; row < last_row; ++row) {
    T* x = static_cast<T*>(a.x) + row * a.x_stride;
    T* residual = static_cast<T*>(a.residual) + row * a.residual_stride;
    for_each_vector(a.width, [&](int64_t i, int n, auto full) {
      store_step(residual + i, load_step(x + i, n, full) + load_step(residual + i, n, full), n, full);
    });
    const auto load_sum = [&](int64_t i, int n, auto full) { return load_step(residual + i, n, full); };
    const Vec scale = Vec::set1(inverse_rms(a.width, a.eps, load_sum));
    for_each_vector(a.width, [&](int64_t i, int n, auto full) {
      store_step(x + i, load_sum(i, n, full) * scale * load_step(weight + i, n, full), n, full);
    });
  }
}

}  // namespace

void rms_norm(const RmsNormArgs& a, int64_t first_row, int64_t last_row) {
  dispatch(a.dtype, [&](auto t) { rms_norm_rows<decltype(t)>(a, first_row, last_row); });
}

void fused_add_rms_norm(const FusedAddRmsNormArgs& a, int64_t first_row, int64_t last_row) {
  dispatch(a.dtype, [&](auto t) { fused_add_rms_norm_rows<decltype(t)>(a, first_row, last_row); });
}

}  // namespace pelton::cpu
