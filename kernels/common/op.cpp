#include "op.h"

namespace pelton {

Rows rows_of(const char* op, const char* name, const Tensor& t) {
  const int64_t dims = t.dim();
  STD_TORCH_CHECK(dims >= 1, op, ": ", name, " must have at least one dimension");
  const int64_t width = t.size(dims - 1);
  STD_TORCH_CHECK(width <= 1 || t.stride(dims - 1) == 1, op, ": ", name,
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
        STD_TORCH_CHECK(size == 0 || t.stride(d) == stride * count, op, ": ", name,
                        "'s leading dimensions must collapse into rows of one stride; make it contiguous");
      }
    }
    count *= size;
  }
  return {width == 0 ? 0 : count, width, stride};
}

}  // namespace pelton
