// Token embedding: row ids[t] of the weight becomes row t of the output.
// One thread copies whole rows.
// Source: none needed.
#include <cstring>

#include "embedding.h"

namespace pelton::cpu {

void embedding(const EmbeddingArgs& a, int64_t first_token, int64_t last_token) {
  if (a.row_bytes == 0) return;  // the pointers may be null
  for (int64_t token = first_token; token < last_token; ++token) {
    std::memcpy(static_cast<char*>(a.out) + token * a.out_stride,
                static_cast<const char*>(a.weight) + a.ids[token] * a.weight_stride, size_t(a.row_bytes));
  }
}

}  // namespace pelton::cpu
