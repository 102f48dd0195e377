// What every op.cpp needs of torch: the stable ABI and nothing else.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

#include "dtype.h"

namespace pelton {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The kernel element type of a tensor; an error that names `op` for any other dtype.
inline DType dtype_of(const char* op, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::Half:
      return DType::f16;
    case ScalarType::BFloat16:
      return DType::bf16;
    default:
      STD_TORCH_CHECK(false, op, ": dtype must be float32, float16 or bfloat16, found ",
                      torch::headeronly::toString(t.scalar_type()));
  }
}

inline void check_same_dtype(const char* op, const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), op, ": dtypes must be equal, found ",
                  torch::headeronly::toString(a.scalar_type()), " and ",
                  torch::headeronly::toString(b.scalar_type()));
}

// Rows of x seen as a matrix [rows, last dim] with one row stride. Leading dimensions
// must be collapsible and the last dimension contiguous; otherwise an error that names `op`.
struct Rows {
  int64_t count, width, stride;
};
Rows rows_of(const char* op, const char* name, const Tensor& t);

// A step of work on the CPU. It runs now; while a CPU graph is being captured on this thread
// it is recorded as well, together with the tensors whose memory it uses (see graph.cpp).
void submit(std::function<void()> step, std::initializer_list<Tensor> uses);

// Splits [0, n) over torch's own threads, at least `grain` items each.
template <class F>
inline void parallel_for(int64_t n, int64_t grain, const F& f) {
  if (n <= grain) {
    if (n > 0) f(int64_t{0}, n);
    return;
  }
  torch::stable::parallel_for(0, n, std::max<int64_t>(1, grain), f);
}

}  // namespace pelton
