#include "op.h"

namespace pelton {

GroupedRows grouped_rows_of(const char* op, const char* name, const Tensor& t) {
  const int64_t dims = t.dim();
  PELTON_CHECK(dims >= 1, op, ": ", name, " must have at least one dimension");
  const int64_t width = t.size(dims - 1);
  PELTON_CHECK(width <= 1 || t.stride(dims - 1) == 1, op, ": ", name,
               "'s last dimension must be contiguous, its stride is ", t.stride(dims - 1));
  if (t.numel() == 0) return {0, width, {1, width, width}};
  // Level 0 holds the rows of a group, level 1 the groups; dimensions join a level from the inside out.
  int64_t count[2] = {1, 1}, stride[2] = {width, width};
  int level = 0;
  for (int64_t d = dims - 2; d >= 0; --d) {
    const int64_t size = t.size(d), step = t.stride(d);
    if (size == 1) continue;
    if (level == 0 && count[0] > 1 && step != stride[0] * count[0]) level = 1;
    if (count[level] == 1) stride[level] = step;
    PELTON_CHECK(step == stride[level] * count[level], op, ": ", name,
                 "'s leading dimensions must collapse into rows of at most two strides, found shape ",
                 shape_of(t), "; make it contiguous");
    count[level] *= size;
  }
  return {count[0] * count[1], width, {count[0], stride[0], stride[1]}};
}

Rows rows_of(const char* op, const char* name, const Tensor& t) {
  const GroupedRows rows = grouped_rows_of(op, name, t);
  PELTON_CHECK(rows.count == 0 || rows.count == rows.layout.per_group, op, ": ", name,
               "'s leading dimensions must collapse into rows of one stride, found shape ", shape_of(t),
               "; make it contiguous");
  return {rows.count, rows.width, rows.layout.stride};
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
