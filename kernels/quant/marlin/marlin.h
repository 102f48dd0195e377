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
  const uint8_t* zeros;  // the same, below 2^bits; null: 2^(bits - 1)
  const int32_t* perm;   // [k]: input k of weight is input perm[k] of x; null: the same
  const void* bias;      // [n] of dtype; null: none
  float* workspace;      // kMarlinCounters counters (int32), which are zero between calls; then partial sums
  int64_t m, n, k, x_stride, out_stride, groups, workspace_size;
  int bits, group_size;  // a multiple of 32; k or more: one group
  DType dtype;           // of out, x, scales and bias
};

constexpr int64_t kMarlinCounters = 1024;

namespace gpu {
int marlin_repack(const MarlinRepackArgs& args, void* stream);
int marlin_gemm(const MarlinGemmArgs& args, void* stream);  // chooses among the following

// Whether x must be copied into the workspace first: permuted inputs, or rows that 16-byte accesses do not
// fit. The kernels below get args without perm, and x with aligned rows of a multiple of 8 elements.
bool marlin_copies_inputs(const MarlinGemmArgs& args);
// Elements (float) of the workspace, with room for copied inputs or without.
int64_t marlin_workspace_size(int64_t m, int64_t n, int64_t k, bool copied);

// mma.sync, sm_80 and later (mma.cuh of this folder): any shape.
int marlin_gemm_mma(const MarlinGemmArgs& args, void* stream);
int64_t marlin_workspace_size_mma(int64_t m, int64_t n, int64_t k);

// wgmma and TMA, sm_90a (gpu_sm90.cu), when the plan defines PELTON_HAS_SM90. `fits` looks at shapes and
// alignment and says when it is the faster one, not at the device, which the caller knows to be of compute
// capability 9.0.
bool marlin_sm90_fits(const MarlinGemmArgs& args);
int marlin_gemm_sm90(const MarlinGemmArgs& args, void* stream);
int64_t marlin_workspace_size_sm90(int64_t m, int64_t n, int64_t k);
}  // namespace gpu

}  // namespace pelton
