// Gated activations: act(gate) * up for SiLU and both forms of GELU.
// A thread works on a range of output elements, so that even one long row is shared by all threads.
// Method: Shazeer, "GLU Variants Improve Transformer", 2020; Hendrycks and Gimpel, "Gaussian Error
// Linear Units", 2016.
#include <algorithm>

#include "../common/simd.h"
#include "activation.h"

namespace pelton::cpu {
namespace {

struct Silu {
  Vec operator()(Vec x) const {
    // For a very negative x the exponential is infinite and the quotient 0.
    return x / (Vec::set1(1.f) + exp(Vec::zero() - x));
  }
};

struct GeluTanh {
  Vec operator()(Vec x) const {
    // 0.5 x (1 + tanh u) = x / (1 + e^-2u), which keeps its relative precision where tanh u is near -1.
    const Vec cubic = fma(x * x, Vec::set1(0.044715f), Vec::set1(1.f));
    const Vec minus_2u = x * cubic * Vec::set1(-1.59576912f);
    return x / (Vec::set1(1.f) + exp(minus_2u));
  }
};

// x times the normal distribution function, whose tail 0.5 erfc(s / sqrt 2), s = |x|, is
// e^(-s^2/2) P(t) / (s + 4) with t = (s - 4) / (s + 4): the substitution that Shepherd and Laframboise use
// in "Chebyshev Approximation of (1 + 2x) exp(x^2) erfc x in 0 <= x < infinity", Math. Comp. 36, 1981.
// P of degree 9 was fitted on 0 <= s <= 14 (relative error 9e-9); beyond that the tail is 0 in fp32.
struct GeluErf {
  Vec operator()(Vec x) const {
    const Vec one = Vec::set1(1.f);
    const Vec s = min(Vec::set1(14.f), abs(x));  // operand order keeps NaN
    const Vec reciprocal = one / (s + Vec::set1(4.f));
    const Vec t = (s - Vec::set1(4.f)) * reciprocal;
    Vec p = Vec::set1(-1.317516235e-04f);
    p = fma(p, t, Vec::set1(1.804945744e-04f));
    p = fma(p, t, Vec::set1(1.571447872e-03f));
    p = fma(p, t, Vec::set1(-3.512326967e-03f));
    p = fma(p, t, Vec::set1(-7.525951552e-03f));
    p = fma(p, t, Vec::set1(6.040357436e-02f));
    p = fma(p, t, Vec::set1(-1.865233616e-01f));
    p = fma(p, t, Vec::set1(3.871369334e-01f));
    p = fma(p, t, Vec::set1(-6.078965906e-01f));
    p = fma(p, t, Vec::set1(7.552851349e-01f));
    // s^2 is rounded, and e^(-s^2/2) would magnify that: put the part that was lost back in.
    const Vec square = s * s;
    const Vec lost = fma(s, s, Vec::zero() - square);
    const Vec gauss = exp(square * Vec::set1(-0.5f)) * fma(lost, Vec::set1(-0.5f), one);
    const Vec factor = p * reciprocal;
    // x first, where it keeps the product from being denormal.
    return select_negative(x, x * factor * gauss, x * (one - factor * gauss));
  }
};

template <class T, class F>
void gated(const GatedActivationArgs& a, int64_t first, int64_t last, F activation) {
  while (first < last) {
    const int64_t row = first / a.width, column = first % a.width;
    const int64_t count = std::min(a.width - column, last - first);
    const T* gate = static_cast<const T*>(a.x) + row * a.x_stride + column;
    const T* up = gate + a.width;
    T* out = static_cast<T*>(a.out) + row * a.out_stride + column;
    for_each_vector(count, [&](int64_t i, int n, auto full) {
      store_step(out + i, activation(load_step(gate + i, n, full)) * load_step(up + i, n, full), n, full);
    });
    first += count;
  }
}

}  // namespace

void activation_and_mul(const GatedActivationArgs& a, int64_t first, int64_t last) {
  dispatch(a.dtype, [&](auto t) {
    using T = decltype(t);
    switch (a.activation) {
      case Activation::silu:
        return gated<T>(a, first, last, Silu{});
      case Activation::gelu_erf:
        return gated<T>(a, first, last, GeluErf{});
      case Activation::gelu_tanh:
        return gated<T>(a, first, last, GeluTanh{});
    }
  });
}

}  // namespace pelton::cpu
