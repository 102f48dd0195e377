#include "op.h"

namespace pelton {

Rows rows_of(const char* op, const char* name, const Tensor& t) {
  const int64_t dims = t.dim();
  PELTON_CHECK(dims >= 1, op, ": ", name, " must have at least one dimension");
  const int64_t width = t.size(dims - 1);
  PELTON_CHECK(width <= 1 || t.stride(dims - 1) == 1, op, ": ", name,
               "'s last dimension must be contiguous, its stride is ", t.stride(dims - 1));
  int64_t count = 1, stride = width;
  bool first = true;
  for (int64_t d = dims - 2; d >= 0; --d) {
    const int64_t size = t.size(d);
    if (size != 1 && count != 0) {
      if (first) {
        stride = t.stride(d);
        first = false;
      } else {
        PELTON_CHECK(size == 0 || t.stride(d) == stride * count, op, ": ", name,
                     "'s leading dimensions must collapse into rows of one stride; make it contiguous");
      }
    }
    count *= size;
  }
  return {width == 0 ? 0 : count, width, stride};
}

std::string shape_of(const Tensor& t) {
  std::string text = "[";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d == 0 ? "" : ", ") + std::to_string(t.size(d));
  return text + "]";
}

void check_same_shape(const char* op, const char* a_name, const Tensor& a, const char* b_name,
                      const Tensor& b) {
  bool same = a.dim() == b.dim();
  for (int64_t d = 0; same && d < a.dim(); ++d) same = a.size(d) == b.size(d);
  PELTON_CHECK(same, op, ": ", a_name, " must have the shape of ", b_name, ", found ", shape_of(a), " and ",
               shape_of(b));
}

void check_index(const char* op, const char* name, const Tensor& t, ScalarType dtype,
                 std::initializer_list<int64_t> shape) {
  PELTON_CHECK(t.scalar_type() == dtype, op, ": ", name, " must be ", torch::headeronly::toString(dtype),
               ", found ", torch::headeronly::toString(t.scalar_type()));
  bool fits = t.dim() == int64_t(shape.size());
  std::string wanted;
  int64_t d = 0;
  for (const int64_t size : shape) {
    fits = fits && (size < 0 || t.size(d) == size);
    wanted += (d++ == 0 ? "" : ", ") + (size < 0 ? std::string("any") : std::to_string(size));
  }
  PELTON_CHECK(fits, op, ": ", name, " must have shape [", wanted, "], found ", shape_of(t));
  PELTON_CHECK(t.is_contiguous(), op, ": ", name, " must be contiguous");
}

void check_heads(const char* op, const char* name, const Tensor& t) {
  PELTON_CHECK(t.dim() == 3, op, ": ", name, " must be [num_tokens, num_heads, head_size], found ",
               shape_of(t));
  PELTON_CHECK(t.size(2) <= 1 || t.stride(2) == 1, op, ": ", name,
               "'s last dimension must be contiguous, its stride is ", t.stride(2));
}

void check_values(const char* op, const char* name, const int64_t* values, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i) {
    PELTON_CHECK(uint64_t(values[i]) < uint64_t(limit), op, ": ", name, "[", i, "] is ", values[i],
                 ", outside of [0, ", limit, ")");
  }
}

}  // namespace pelton
