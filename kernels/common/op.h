// What every op.cpp needs of torch: the stable ABI and nothing else.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dtype.h"
#include "rows.h"
#include "tensor.h"

namespace pelton {

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// Raises RuntimeError in Python with exactly these parts as the message, which begin with the operator's
// name. (STD_TORCH_CHECK would put the source file's path in front.) A macro, so that the parts are not
// evaluated unless the check fails. Not inside of a parallel loop.
#define PELTON_CHECK(condition, ...) \
  do {                               \
    if (!(condition)) [[unlikely]] { \
      ::pelton::fail(__VA_ARGS__);   \
    }                                \
  } while (false)

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
      fail(op, ": dtype must be float32, float16 or bfloat16, found ",
           torch::headeronly::toString(t.scalar_type()));
  }
}

inline void check_same_dtype(const char* op, const Tensor& a, const Tensor& b) {
  PELTON_CHECK(a.scalar_type() == b.scalar_type(), op, ": dtypes must be equal, found ",
               torch::headeronly::toString(a.scalar_type()), " and ",
               torch::headeronly::toString(b.scalar_type()));
}

// Rows of x seen as a matrix [rows, last dim] with one row stride. Leading dimensions
// must be collapsible and the last dimension contiguous; otherwise an error that names `op`.
struct Rows {
  int64_t count, width, stride;
};
Rows rows_of(const char* op, const char* name, const Tensor& t);

// The same with two strides allowed, so that the heads of a qkv buffer are rows too.
struct GroupedRows {
  int64_t count, width;
  RowLayout layout;
};
GroupedRows grouped_rows_of(const char* op, const char* name, const Tensor& t);

// "[3, 0, 64]", for messages.
std::string shape_of(const Tensor& t);

// The shapes of two tensors must be equal.
void check_same_shape(const char* op, const char* a_name, const Tensor& a, const char* b_name,
                      const Tensor& b);

// An index tensor must be contiguous, of this dtype and shape; -1 stands for any size.
void check_index(const char* op, const char* name, const Tensor& t, ScalarType dtype,
                 std::initializer_list<int64_t> shape);

// A strided tensor [rows, heads, head size] of a qkv buffer must have three dimensions, the last contiguous.
void check_heads(const char* op, const char* name, const Tensor& t);

// Values that kernels use as indexes must lie in [0, limit). To be called inside a step, because a
// replayed graph finds other values. `name` and the position of the bad value stand in the error.
void check_values(const char* op, const char* name, const int64_t* values, int64_t count, int64_t limit);

// A step of work on the CPU. It runs now; while a CPU graph is being captured on this thread
// it is recorded as well, together with the tensors whose memory it uses (see graph.cpp).
void submit(std::function<void()> step, std::initializer_list<std::reference_wrapper<const Tensor>> uses);

// Splits [0, n) over torch's own threads, at least `grain` items each.
template <class F>
inline void parallel_for(int64_t n, int64_t grain, const F& f) {
  if (n <= grain) {
    if (n > 0) f(int64_t{0}, n);
    return;
  }
  torch::stable::parallel_for(0, n, std::max<int64_t>(1, grain), f);
}

// Runs f(0) ... f(n - 1) on torch's own threads. Each thread takes the next task when it has
// finished one, so that a thread that the machine holds up does not hold up the rest.
template <class F>
inline void parallel_tasks(int64_t n, const F& f) {
  std::atomic<int64_t> next{0};
  const auto run = [&](int64_t, int64_t) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < n;) f(task);
  };
  parallel_for(std::min<int64_t>(n, torch::stable::get_num_threads()), 1, run);
}

}  // namespace pelton
