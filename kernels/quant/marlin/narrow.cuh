// Products of at most 16 tokens with weights of 4 or 8 bits by matrix instructions of sm_80, which take as
// long as the weights take to read. A block has some slabs of 16 outputs and all inputs, or a part of them
// where x would not fit into shared memory; its warps take the inputs in turn, 128 at a time, through
// pipelines of their own, and put their sums together once for up to four slabs. Zeros are taken off a
// group's sum, with the sum of its inputs, and not off each weight. Methods: as in gemm.cuh, which has the
// kernel for all other products.
#pragma once
#include "gemm.cuh"

namespace pelton::gpu::marlin {

constexpr int kNarrowTokens = 16;
constexpr int kPanel = 2 * kTile, kPanelSteps = kPanel / 16;  // inputs that a warp multiplies at once
constexpr int kNarrowWarps = 16;                              // of a block, at most

struct NarrowPlan {
  Cutting slabs, panels;  // between ranges of outputs, and between the splits of each
  Reciprocal per_split, per_group;
  int splits, warps, pairs;  // pairs of slabs under way of each warp
  int exchange_slabs;        // that are put together at once
  int x_row_bytes, input_tiles, blocks;
  bool paired;  // outputs may be written two at a time
};

template <class T_, int Bits_, int TokenBlocks_>
struct NarrowShape {
  using T = T_;
  static constexpr int kBits = Bits_, kTokenBlocks = TokenBlocks_;
  static constexpr int kSlabsAtOnce = kTokenBlocks == 1 && kBits == 4 ? 8 : 4;  // whose sums are in registers
  static constexpr int kParts = kBits / 4;  // accesses of a lane for a slab of a tile
  static constexpr int kTileBytes = tile_bytes(kBits), kSlabBytes = slab_bytes(kBits);
  // A pair: the weights of two slabs, their scales and their zeros.
  static constexpr int kScalesAt = 2 * 2 * kSlabBytes, kZerosAt = kScalesAt + 2 * kSlab * 2;
  static constexpr int kPairBytes = kZerosAt + 2 * kSlab;
  static constexpr int kSumFloats = kTokenBlocks * kWarp * 4;  // of a slab
  static constexpr int kHalves = 2 * kTokenBlocks;             // of its sums: 8 outputs of 8 tokens
};

// The copies of one warp: its panels for four slabs, then for the next four, in pairs of slabs.
template <class S>
struct NarrowLoader {
  using T = typename S::T;
  const MarlinGemmArgs& a;
  const NarrowPlan& plan;
  SharedAddress ring;
  int first_panel, last_panel, last_slab, lane;
  int base, panel;  // of the next pair: the first of the four slabs, the panel
  int pair = 0, slot = 0;

  __device__ __forceinline__ void copy() {
    if (base >= last_slab) return;
    const SharedAddress to = ring + slot * S::kPairBytes;
    const int first = base + 2 * pair;
    const unsigned char* const weight = static_cast<const unsigned char*>(a.weight);
    const bool second_tile = 2 * panel + 1 < plan.input_tiles;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slab = first + i;
      if (i == 1 && slab >= last_slab) break;
      const unsigned char* const from =
          weight + (int64_t(slab / kSlabs) * plan.input_tiles + 2 * panel) * S::kTileBytes +
          slab % kSlabs * S::kSlabBytes + lane * kLanePart;
#pragma unroll
      for (int part = 0; part < S::kParts; ++part) {
        const SharedAddress at = to + ((2 * i * S::kParts + part) * kWarp + lane) * kLanePart;
        copy_async16(at, from + part * kWarp * kLanePart);
        copy_async16(at + S::kParts * kWarp * kLanePart,
                     second_tile ? from + S::kTileBytes + part * kWarp * kLanePart : from, second_tile);
      }
    }
    // Lanes 0 to 3 copy two slabs' scales, lanes 4 and 5 their zeros.
    const bool scales = lane < 4;
    const int slab = min(first + (scales ? lane / 2 : lane - 4), last_slab - 1);
    if (scales || (lane < 6 && a.zeros != nullptr)) {
      const int group = plan.per_group.divide(panel);
      const int64_t at = (int64_t(slab / kSlabs) * a.groups + group) * kTile + slab % kSlabs * kSlab;
      const void* const from =
          scales ? static_cast<const void*>(static_cast<const T*>(a.scales) + at + lane % 2 * 8)
                 : static_cast<const void*>(a.zeros + at);
      copy_async16(to + S::kScalesAt + lane * 16, from);
    }
    const int pairs = (min(last_slab - base, S::kSlabsAtOnce) + 1) / 2;
    if (++pair == pairs) {
      pair = 0;
      panel += plan.warps;
      if (panel >= last_panel) {
        panel = first_panel;
        base += S::kSlabsAtOnce;
      }
    }
  }
  __device__ __forceinline__ void close() {
    slot = slot + 1 == plan.pairs ? 0 : slot + 1;
    copy_async_commit();
  }
};

// The oldest of as many pairs as there are slots is there.
__device__ __forceinline__ void wait_for_pair(int pairs) {
  if (pairs == 2) {
    copy_async_wait<1>();
  } else {
    copy_async_wait<0>();
  }
}

// x of a panel as B operand, and the sums of its inputs.
template <class S>
struct PanelInputs {
  uint32_t b[S::kTokenBlocks][kPanelSteps][2];
  float sums[S::kTokenBlocks][4];

  __device__ __forceinline__ void load(SharedAddress x, int row_bytes, int tokens, int lane) {
    using T = typename S::T;
    constexpr uint32_t kOne = T::is_bf16 ? 0x3f803f80u : 0x3c003c00u;
    constexpr uint32_t kOnes[4] = {kOne, kOne, kOne, kOne};
#pragma unroll
    for (int n = 0; n < S::kTokenBlocks; ++n) {
      const SharedAddress row = x + min(8 * n + lane % 8, tokens - 1) * row_bytes + lane / 8 * 16;
#pragma unroll
      for (int step = 0; step < kPanelSteps; step += 2) {
        uint32_t r[4];
        load_matrix_x4<false>(r, row + step * 32);
        b[n][step][0] = r[0], b[n][step][1] = r[1], b[n][step + 1][0] = r[2], b[n][step + 1][1] = r[3];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0;
      if constexpr (kRaw<T, S::kBits>) {
#pragma unroll
        for (int step = 0; step < kPanelSteps; ++step) mma_m16n8k16<T>(sums[n], kOnes, b[n][step]);
      }
    }
  }
};

// What a lane needs of a slab of a panel.
template <class S>
struct SlabWeights {
  Vector<uint32_t, 4> words[2][S::kParts];
  uint32_t scales, zeros;  // of rows group and group + 8

  __device__ __forceinline__ void load(const unsigned char* pair, int i, bool with_zeros, int lane) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int part = 0; part < S::kParts; ++part) {
        words[tile][part] = load_vector<uint32_t>(reinterpret_cast<const uint32_t*>(
            pair + (((2 * i + tile) * S::kParts + part) * kWarp + lane) * kLanePart));
      }
    }
    scales = *reinterpret_cast<const uint32_t*>(pair + S::kScalesAt + i * kSlab * 2 + lane / 4 * 4);
    zeros = S::kBits == 4 ? 0x0808u : 0x8080u;
    if (with_zeros) zeros = *reinterpret_cast<const uint16_t*>(pair + S::kZerosAt + i * kSlab + lane / 4 * 2);
  }

  // Adds the products with a panel's inputs.
  __device__ __forceinline__ void multiply(float (&sums)[S::kTokenBlocks][4],
                                           const PanelInputs<S>& inputs) const {
    using T = typename S::T;
    const float scale[2] = {to_float(T{uint16_t(scales)}), to_float(T{uint16_t(scales >> 16)})};
    float part[S::kTokenBlocks][4] = {};
    SlabZeros exact{};
    if constexpr (!kRaw<T, S::kBits>) exact = slab_zeros<T, S::kBits>(zeros);
#pragma unroll
    for (int step = 0; step < kPanelSteps; ++step) {
      uint32_t w[4];
      if constexpr (kRaw<T, S::kBits>) {
        unpack<T, S::kBits>(w, words[step / kSteps], step % kSteps);
      } else {
        dequantize<T, S::kBits>(w, words[step / kSteps], step % kSteps, exact);
      }
#pragma unroll
      for (int n = 0; n < S::kTokenBlocks; ++n) mma_m16n8k16<T>(part[n], w, inputs.b[n][step]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      constexpr RawForm kForm = raw_form<T, S::kBits>();
      const float factor = scale[half] * (half == 0 ? kForm.low_factor : kForm.high_factor);
      const float zero = scale[half] * (float(zeros >> (8 * half) & 255u) + kForm.offset);
#pragma unroll
      for (int n = 0; n < S::kTokenBlocks; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          sums[n][i] = fmaf(part[n][i], factor, sums[n][i]);
          if constexpr (kRaw<T, S::kBits>) sums[n][i] = fmaf(-zero, inputs.sums[n][i % 2], sums[n][i]);
        }
      }
    }
  }
};

template <class S>
__global__ void __launch_bounds__(kNarrowWarps* kWarp, 1)
    narrow_kernel(const __grid_constant__ MarlinGemmArgs a, const __grid_constant__ NarrowPlan plan) {
  using T = typename S::T;
  const int lane = threadIdx.x % kWarp, warp = shuffle(int(threadIdx.x / kWarp), 0);
  const int range = plan.per_split.divide(blockIdx.x), split = int(blockIdx.x) - range * plan.splits;
  const int first_slab = plan.slabs.first(range), last_slab = plan.slabs.first(range + 1);
  const int begin_panel = plan.panels.first(split), last_panel = plan.panels.first(split + 1);
  const int first_panel = begin_panel + warp, tokens = int(a.m);
  // What the warps exchange, each one's pairs, the block's x.
  float* const exchange = dynamic_shared<float>();
  unsigned char* const rings =
      reinterpret_cast<unsigned char*>(exchange + plan.exchange_slabs * plan.warps * S::kSumFloats);
  unsigned char* const ring = rings + warp * plan.pairs * S::kPairBytes;
  unsigned char* const x = rings + plan.warps * plan.pairs * S::kPairBytes;

  NarrowLoader<S> loader{.a = a,
                         .plan = plan,
                         .ring = shared_address(ring),
                         .first_panel = first_panel,
                         .last_panel = last_panel,
                         .last_slab = last_slab,
                         .lane = lane,
                         .base = first_panel < last_panel ? first_slab : last_slab,
                         .panel = first_panel};
  loader.copy();
  const int first_row = int(blockIdx.x) % tokens;
#pragma unroll 1
  for (int panel = first_panel; panel < last_panel; panel += plan.warps) {
#pragma unroll 1
    for (int i = lane / 16; i < tokens; i += 2) {
      // Blocks begin with different rows, so that not all ask for the same lines at once.
      const int row = i + first_row < tokens ? i + first_row : i + first_row - tokens;
      const int input = panel * kPanel + lane % 16 * 8;
      const bool valid = input < int(a.k);
      const T* const from = static_cast<const T*>(a.x) + (valid ? row * a.x_stride + input : 0);
      copy_async16(
          shared_address(x) + row * plan.x_row_bytes + (panel - begin_panel) * (kPanel * 2) + lane % 16 * 16,
          from, valid);
    }
  }
  loader.close();
#pragma unroll 1
  for (int i = 1; i < plan.pairs; ++i) {
    loader.copy();
    loader.close();
  }

  uint32_t* const counters = reinterpret_cast<uint32_t*>(a.workspace);
  const int most_slabs = plan.slabs.each + (plan.slabs.longer > 0 ? 1 : 0);
  float* const slots = a.workspace + kMarlinCounters;
  const auto slot_of = [&](int split, int slab) {
    return slots + ((int64_t(range) * plan.splits + split) * most_slabs + slab - first_slab) * S::kSumFloats;
  };
  const auto half_of = [&](int half) { return (half / 2 * kWarp + lane) * 4 + half % 2 * 2; };
  int slot = 0;
#pragma unroll 1
  for (int base = first_slab; base < last_slab; base += S::kSlabsAtOnce) {
    const int count = min(last_slab - base, S::kSlabsAtOnce);
    float sums[S::kSlabsAtOnce][S::kTokenBlocks][4] = {};
#pragma unroll 1
    for (int panel = first_panel; panel < last_panel; panel += plan.warps) {
      PanelInputs<S> inputs;
#pragma unroll
      for (int pair = 0; pair < S::kSlabsAtOnce / 2; ++pair) {
        if (2 * pair >= count) break;
        wait_for_pair(plan.pairs);
        __syncwarp();
        if (pair == 0) {
          inputs.load(shared_address(x) + (panel - begin_panel) * (kPanel * 2), plan.x_row_bytes, int(a.m),
                      lane);
        }
        const unsigned char* const at = ring + slot * S::kPairBytes;
        const auto release = [&] {
          slot = slot + 1 == plan.pairs ? 0 : slot + 1;
          __syncwarp();  // all have read the slot
          loader.copy();
          loader.close();
        };
        const bool both = 2 * pair + 1 < count, with_zeros = a.zeros != nullptr;
        SlabWeights<S> first, second;
        first.load(at, 0, with_zeros, lane);
        if constexpr (S::kTokenBlocks == 1) {
          if (both) second.load(at, 1, with_zeros, lane);
          release();
          first.multiply(sums[2 * pair], inputs);
        } else {  // there are no registers for both
          first.multiply(sums[2 * pair], inputs);
          if (both) second.load(at, 1, with_zeros, lane);
          release();
        }
        if (both) second.multiply(sums[2 * pair + 1], inputs);
      }
    }
    const int parts = min(plan.warps, last_panel - begin_panel);
#pragma unroll 1
    for (int first = 0; first < count; first += plan.exchange_slabs) {
      const int here = min(count - first, plan.exchange_slabs);
      __syncthreads();  // the last exchange has been read
#pragma unroll
      for (int s = 0; s < S::kSlabsAtOnce; ++s) {
        if (s < first || s >= first + here || warp >= parts) continue;
#pragma unroll
        for (int n = 0; n < S::kTokenBlocks; ++n) {
          float* const to = exchange + ((s - first) * plan.warps + warp) * S::kSumFloats;
          store_vector(to + (n * kWarp + lane) * 4,
                       Vector<float, 4>{sums[s][n][0], sums[s][n][1], sums[s][n][2], sums[s][n][3]});
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int task = warp; task < here * S::kHalves; task += plan.warps) {
        const int s = task / S::kHalves, half = task % S::kHalves, slab = base + first + s;
        const auto sum =
            sum_of_parts<2>(exchange + s * plan.warps * S::kSumFloats + half_of(half), S::kSumFloats, parts);
        if (plan.splits == 1) {
          write_half<T>(a, plan.paired, sum, slab * kSlab + half % 2 * 8, half / 2 * 8, lane);
        } else {
          store_vector(slot_of(split, slab) + half_of(half), sum);
        }
      }
    }
  }
  copy_async_wait<0>();
  if (plan.splits == 1) return;

  __shared__ bool came_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    came_last = atomicAdd(&counters[range], 1u) == uint32_t(plan.splits - 1);
    if (came_last) counters[range] = 0;
  }
  __syncthreads();
  if (!came_last) return;
  __threadfence();
#pragma unroll 1
  for (int task = warp; task < (last_slab - first_slab) * S::kHalves; task += plan.warps) {
    const int slab = first_slab + task / S::kHalves, half = task % S::kHalves;
    const auto sum =
        sum_of_parts<2>(slot_of(0, slab) + half_of(half), int64_t(most_slabs) * S::kSumFloats, plan.splits);
    write_half<T>(a, plan.paired, sum, slab * kSlab + half % 2 * 8, half / 2 * 8, lane);
  }
}

// How a launch cuts its work; shared_bytes 0: it does not fit.
template <class S>
NarrowPlan narrow_plan(const MarlinGemmArgs& a, int& shared_bytes) {
  const DeviceProperties& device = device_properties();
  constexpr int kStaticBytes = 1024;
  const int64_t room = device.shared_memory_per_block - kStaticBytes;
  const int64_t processors = std::min<int64_t>(device.multiprocessors, kMarlinCounters);
  const int64_t slabs = ceil_div<int64_t>(a.n, kSlab), panels = ceil_div<int64_t>(a.k, kPanel);
  struct Choice {
    int warps, pairs;
  };
  // With more under way each warp's stream is longer, and the whole is slower.
  constexpr Choice kChoices[] = {{16, 2}, {8, 2}};
  constexpr int64_t kMostInputBytes = 72 * 1024;  // of a block's x, which all blocks read at once
  // Few outputs leave processors for splits of the inputs, of a panel for each of eight warps at least.
  const int64_t useful = std::clamp<int64_t>(processors / slabs, 1, std::max<int64_t>(1, panels / 8));
  for (int64_t splits = useful; splits <= std::min(panels, processors); ++splits) {
    const int64_t row_bytes = ceil_div(panels, splits) * kPanel * 2 + 16;  // rows in different banks
    if (a.m * row_bytes > kMostInputBytes && splits < panels) continue;
    for (const Choice choice : kChoices) {
      if (choice.warps == 8 && room > 128 * 1024) continue;
      const int64_t ring = int64_t(choice.warps) * choice.pairs * S::kPairBytes;
      for (const int exchange_slabs : {S::kSlabsAtOnce, 1}) {
        const int64_t bytes =
            int64_t(exchange_slabs) * choice.warps * S::kSumFloats * 4 + ring + a.m * row_bytes;
        if (bytes > room) continue;
        shared_bytes = int(bytes);
        const int64_t ranges = std::min(slabs, processors / splits);
        return {.slabs = Cutting(slabs, ranges),
                .panels = Cutting(panels, splits),
                .per_split = Reciprocal(splits),
                .per_group = Reciprocal(a.groups == 1 ? panels + 1 : a.group_size / kPanel),
                .splits = int(splits),
                .warps = choice.warps,
                .pairs = choice.pairs,
                .exchange_slabs = exchange_slabs,
                .x_row_bytes = int(row_bytes),
                .input_tiles = int(tiles(a.k)),
                .blocks = int(ranges * splits),
                .paired = access_bytes({address(a.out), a.n * 2, a.out_stride * 2}) >= 4};
      }
    }
  }
  shared_bytes = 0;
  return {.slabs = Cutting(0, 1),
          .panels = Cutting(0, 1),
          .per_split = Reciprocal(1),
          .per_group = Reciprocal(1)};
}

inline bool narrow_fits(const MarlinGemmArgs& a) {
  constexpr int64_t kMost = int64_t(1) << 21;  // Reciprocal's limit
  return a.m <= kNarrowTokens && (a.groups == 1 || a.group_size % kPanel == 0) && a.n < kMost && a.k < kMost;
}

template <class S>
int64_t narrow_workspace(const MarlinGemmArgs& a) {
  int shared_bytes;
  const NarrowPlan plan = narrow_plan<S>(a, shared_bytes);
  if (shared_bytes == 0 || plan.splits == 1) return kMarlinCounters;
  return kMarlinCounters + int64_t(plan.blocks) * (plan.slabs.each + 1) * S::kSumFloats;
}

template <class S>
int start_narrow(const MarlinGemmArgs& a, cudaStream_t stream, bool& started) {
  int shared_bytes;
  const NarrowPlan plan = narrow_plan<S>(a, shared_bytes);
  started = shared_bytes != 0;
  if (!started) return 0;
  if (const int error = allow_shared_memory(narrow_kernel<S>, shared_bytes)) return error;
  narrow_kernel<S><<<unsigned(plan.blocks), plan.warps * kWarp, shared_bytes, stream>>>(a, plan);
  return launch_result();
}

}  // namespace pelton::gpu::marlin
