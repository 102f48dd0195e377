// Boundary between device code (no torch) and the operators (no device code).
#pragma once
#include <cstdint>

#include "../../common/dtype.h"

namespace pelton {

struct MarlinRepackArgs {
  void* out;            // [tiles(n), tiles(k), tile], see layout.h
  const uint8_t* q;     // [n, k], contiguous
  const int32_t* perm;  // [k]: input k of out is input perm[k] of q; null: the same
  int64_t n, k;
  int bits;
};

struct MarlinGemmArgs {
  void* out;             // [m, n], row stride out_stride
  const void* x;         // [m, k], row stride x_stride
  const void* weight;    // [tiles(n), tiles(k), tile], see layout.h
  const void* scales;    // [tiles(n), groups, 64]
  const uint8_t* zeros;  // the same; null: 2^(bits - 1)
  const int32_t* perm;   // [k]: input k of weight is input perm[k] of x; null: the same
  float* workspace;  // counters first, which are zero between calls; then partial sums and permuted inputs
  int64_t m, n, k, x_stride, out_stride, groups, workspace_size;
  int bits, group_size;  // group_size k or more: one group
  DType dtype;           // of out, x and scales
};

namespace gpu {
int marlin_repack(const MarlinRepackArgs& args, void* stream);
int marlin_gemm(const MarlinGemmArgs& args, void* stream);

// Elements (float) of the workspace.
int64_t marlin_workspace_size(int64_t m, int64_t n, int64_t k, bool permuted);
}  // namespace gpu

}  // namespace pelton
