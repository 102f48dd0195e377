#include <string>

#include "../common/device.h"
#include "../common/op.h"
#include "activation.h"

namespace pelton {
namespace {

// Below this many elements a thread costs more than it brings.
constexpr int64_t kGrainElements = 8192;

void activation_and_mul(const char* op, Tensor& out, const Tensor& x, Activation activation) {
  check_device(op, {{"x", x}, {"out", out}});
  const Rows in = rows_of(op, "x", x), to = rows_of(op, "out", out);
  check_same_dtype(op, x, out);
  bool fits = out.dim() == x.dim() && in.width == 2 * to.width;
  for (int64_t d = 0; fits && d + 1 < x.dim(); ++d) fits = out.size(d) == x.size(d);
  PELTON_CHECK(fits, op, ": out must have the shape of x with half of its last dimension, found ",
               shape_of(out), " and x ", shape_of(x));
  const GatedActivationArgs args{
      out.mutable_data_ptr(), x.const_data_ptr(), to.width, in.stride, to.stride, activation,
      dtype_of(op, x)};
  if constexpr (kGpu) {
    launch(op, x, [&](void* stream) { return gpu::activation_and_mul(args, to.count, stream); });
  } else {
    submit(
        [args, elements = to.count * to.width] {
          parallel_for(elements, kGrainElements,
                       [&](int64_t first, int64_t last) { cpu::activation_and_mul(args, first, last); });
        },
        {out, x});
  }
}

void silu_and_mul(Tensor& out, const Tensor& x) {
  activation_and_mul("silu_and_mul", out, x, Activation::silu);
}

void gelu_and_mul(Tensor& out, const Tensor& x, const std::string& approximate) {
  PELTON_CHECK(approximate == "none" || approximate == "tanh",
               "gelu_and_mul: approximate must be \"none\" or \"tanh\", found \"", approximate, "\"");
  activation_and_mul("gelu_and_mul", out, x,
                     approximate == "none" ? Activation::gelu_erf : Activation::gelu_tanh);
}

}  // namespace
}  // namespace pelton

STABLE_TORCH_LIBRARY_FRAGMENT(pelton, m) {
  m.def("silu_and_mul(Tensor(a!) out, Tensor x) -> ()");
  m.def("gelu_and_mul(Tensor(a!) out, Tensor x, str approximate) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pelton, CompositeExplicitAutograd, m) {
  m.impl("silu_and_mul", TORCH_BOX(&pelton::silu_and_mul));
  m.impl("gelu_and_mul", TORCH_BOX(&pelton::gelu_and_mul));
}
