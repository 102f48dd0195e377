// Packing of weights into Marlin's layout, copies of permuted inputs, and the choice of the kernel for a
// product. A thread packs the 16 bytes that a lane will read at once, or copies 8 inputs. The layout is
// described in layout.h.
#include "../../common/gpu.cuh"
#include "layout.h"
#include "marlin.h"
#include "product.cuh"

namespace pelton::gpu {

namespace marlin {
int product_f16_4(const MarlinGemmArgs& args, cudaStream_t stream);
int product_f16_8(const MarlinGemmArgs& args, cudaStream_t stream);
int product_bf16_4(const MarlinGemmArgs& args, cudaStream_t stream);
int product_bf16_8(const MarlinGemmArgs& args, cudaStream_t stream);
}  // namespace marlin

namespace {

using namespace pelton::marlin;

constexpr int kThreads = 256;

template <int Bits>
__global__ void __launch_bounds__(kThreads)
    repack_kernel(const MarlinRepackArgs a, int64_t count, Divisor input_tiles) {
  const int64_t part = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (part >= count) return;
  constexpr int kHalves = Bits / 4, kTileParts = tile_bytes(Bits) / kLanePart;
  constexpr int kWordValues = 32 / Bits, kFragmentWords = Bits / 4;
  int64_t input_tile;
  const int64_t row_tile = input_tiles.divide(part / kTileParts, input_tile);
  const int in_tile = int(part % kTileParts), lane = in_tile % kWarp;
  const int half = in_tile / kWarp % kHalves, slab = in_tile / (kWarp * kHalves);
  const int64_t first_row = row_tile * kTile + slab * kSlab;
  Vector<uint32_t, 4> words{};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int step = half * 2 + j / kFragmentWords;
#pragma unroll
    for (int v = 0; v < kWordValues; ++v) {
      const int i = Bits == 4 ? v % 4 : j % 2 * 2 + v / 2, pair_half = Bits == 4 ? v / 4 : v % 2;
      const int64_t row = first_row + fragment_row(lane, i);
      int64_t input = input_tile * kTile + step * 16 + fragment_input(lane, i, pair_half);
      if (row >= a.n || input >= a.k) continue;
      if (a.perm != nullptr) input = a.perm[input];
      if (uint64_t(input) >= uint64_t(a.k)) continue;
      words[j] |= uint32_t(a.q[row * a.k + input] & ((1 << Bits) - 1)) << (Bits * v);
    }
  }
  store_vector(static_cast<uint32_t*>(a.out) + part * 4, words);
}

// Rows of x with their inputs in the order of perm, padded with zeros to whole tiles.
__global__ void __launch_bounds__(kThreads) copy_inputs_kernel(const __grid_constant__ MarlinGemmArgs a,
                                                               uint16_t* out, int64_t count, Divisor pieces) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) {
    int64_t piece;
    const int64_t token = pieces.divide(i, piece);
    const auto* const row = static_cast<const uint16_t*>(a.x) + token * a.x_stride;
    Vector<uint16_t, 8> values{};
#pragma unroll
    for (int v = 0; v < 8; ++v) {
      int64_t input = piece * 8 + v;
      if (input >= a.k) continue;
      if (a.perm != nullptr) input = a.perm[input];
      if (uint64_t(input) < uint64_t(a.k)) values[v] = row[input];
    }
    store_vector(out + i * 8, values);
  }
}

// Floats of a copy of x.
int64_t copied_floats(int64_t m, int64_t k) { return m * tiles(k) * kTile / 2; }

}  // namespace

int marlin_repack(const MarlinRepackArgs& a, void* stream) {
  const int64_t count = tiles(a.n) * tiles(a.k) * tile_bytes(a.bits) / kLanePart;
  if (count == 0) return 0;
  const unsigned blocks = grid_size(ceil_div<int64_t>(count, kThreads));
  const Divisor input_tiles(tiles(a.k));
  if (a.bits == 4) {
    repack_kernel<4><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(a, count, input_tiles);
  } else {
    repack_kernel<8><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(a, count, input_tiles);
  }
  return launch_result();
}

bool marlin_copies_inputs(const MarlinGemmArgs& a) {
  return a.perm != nullptr || access_bytes({address(a.x), a.k * 2, a.x_stride * 2}) < 16;
}

int64_t marlin_workspace_size(int64_t m, int64_t n, int64_t k, bool copied) {
  int64_t size = marlin_workspace_size_mma(m, n, k);
#ifdef PELTON_HAS_SM90
  size = std::max(size, marlin_workspace_size_sm90(m, n, k));
#endif
  // The copy begins at 16 bytes, wherever the workspace ends.
  return size + (copied ? copied_floats(m, k) + 4 : 0);
}

int marlin_gemm_mma(const MarlinGemmArgs& a, void* stream) {
  if (a.dtype == DType::f16) {
    return a.bits == 4 ? marlin::product_f16_4(a, cudaStream_t(stream))
                       : marlin::product_f16_8(a, cudaStream_t(stream));
  }
  return a.bits == 4 ? marlin::product_bf16_4(a, cudaStream_t(stream))
                     : marlin::product_bf16_8(a, cudaStream_t(stream));
}

int64_t marlin_workspace_size_mma(int64_t m, int64_t n, int64_t k) {
  if (m == 0 || n == 0 || k == 0) return kMarlinCounters;
  MarlinGemmArgs a{};
  a.m = m, a.n = n, a.k = k;
  a.groups = 1;
  return std::max(marlin::workspace_of<4>(a), marlin::workspace_of<8>(a));
}

int marlin_gemm(const MarlinGemmArgs& args, void* stream) {
  if (args.m == 0 || args.n == 0) return 0;
  MarlinGemmArgs a = args;
  if (marlin_copies_inputs(a)) {
    a.workspace_size = (a.workspace_size - copied_floats(a.m, a.k)) / 4 * 4;
    auto* const copy = reinterpret_cast<uint16_t*>(a.workspace + a.workspace_size);
    const int64_t pieces = tiles(a.k) * kTile / 8, count = a.m * pieces;
    copy_inputs_kernel<<<grid_size(ceil_div<int64_t>(count, kThreads)), kThreads, 0, cudaStream_t(stream)>>>(
        args, copy, count, Divisor(pieces));
    if (const int error = launch_result()) return error;
    a.x = copy;
    a.x_stride = tiles(a.k) * kTile;
    a.perm = nullptr;
    a.k = a.x_stride;
  }
#ifdef PELTON_HAS_SM90
  if (device_properties().compute_capability == 90 && marlin_sm90_fits(a)) return marlin_gemm_sm90(a, stream);
#endif
  return marlin_gemm_mma(a, stream);
}

}  // namespace pelton::gpu
