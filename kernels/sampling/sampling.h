// Boundary between device code (no torch) and the operators (no device code).
#pragma once
#include <cstdint>

#include "../common/dtype.h"
#include "../common/rows.h"

namespace pelton {

struct SampleArgs {
  int64_t* out;        // [rows]
  float* logprobs;     // [rows] or null
  const void* logits;  // [rows, vocab]
  int64_t stride, vocab;
  const float* temperature;          // [rows]
  const int32_t* top_k;              // [rows] or null
  const float *top_p, *min_p;        // [rows] or null
  const int64_t *seeds, *positions;  // [rows]
  void* workspace;                   // rows * sample_workspace_bytes(vocab)
  DType dtype;
};

// The vocabulary is read in slices of this many tokens, one block each, and the maximum of each chunk is
// noted.
constexpr int kSampleSlice = 4096;
constexpr int kSampleChunk = 128;
constexpr int kSampleBins = 512;
// Beyond this the fixed-point masses of all tokens together could exceed 64 bits.
constexpr int64_t kSampleMaxVocab = 1 << 20;

struct SliceStatistics {
  uint64_t best;          // the largest logit and its first token, see gpu.cu
  float scaled_sum, sum;  // of exp(logit - the slice's maximum), with and without temperature
};

PELTON_HOST_DEVICE constexpr int64_t sample_slices(int64_t vocab) {
  return (vocab + kSampleSlice - 1) / kSampleSlice;
}
PELTON_HOST_DEVICE constexpr int64_t sample_workspace_bytes(int64_t vocab) {
  return sample_slices(vocab) *
             int64_t(sizeof(SliceStatistics) + kSampleSlice / kSampleChunk * sizeof(float)) +
         kSampleBins * int64_t(sizeof(uint64_t) + sizeof(uint32_t)) + 2 * int64_t(sizeof(uint32_t));
}

// GPU launchers return the runtime's error, 0 for none.
namespace gpu {
int sample(const SampleArgs& args, int64_t rows, void* stream);
int greedy_sample(const SampleArgs& args, int64_t rows, void* stream);
}  // namespace gpu

}  // namespace pelton
