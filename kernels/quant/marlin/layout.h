// The packed layout of quantized weights, one for all Marlin kernels (sm_80 and sm_90), host and device.
//
// The weights are the A operand of the matrix instructions, out^T = W x^T: outputs (N) are its rows, tokens
// its columns. A warp's A fragment of m16n8k16 and wgmma's A fragment in registers (m64nNk16, of which a warp
// has 16 rows) are the same, so both read a lane's part of the weights as it lies in memory.
//
//   weight   [N / 64][K / 64] tiles of 64 outputs x 64 inputs, each contiguous: the weights of 64 outputs are
//   one
//            stream along K. N and K are rounded up to 64 with zeros (x beyond K must count as zero).
//     4 bits: [slab of 16 rows: 4][lane: 32][16 bytes]; word j of the 16 bytes belongs to inputs 16 j ...
//     + 15. 8 bits: [slab: 4][half: 2][lane: 32][16 bytes]; words 2 j and 2 j + 1 of half h belong to inputs
//             16 (2 h + j) ... + 15.
//   In a lane's part, with group = lane / 4 and pair = lane % 4, the A fragment of 16 inputs is
//     a0: row group,     inputs 2 pair, + 1;      a1: row group + 8, the same inputs
//     a2: row group,     inputs 2 pair + 8, + 9;  a3: row group + 8, the same inputs
//   and ai's two values are
//     4 bits: nibbles i and i + 4 of the word, so that (word >> 4 i) & 0x000f000f has them in its halves
//     8 bits: bytes 2 i and 2 i + 1 of the two words
//
//   scales   [N / 64][groups][64], zeros (uint8) in the same order: those of 64 outputs are one stream along
//            K, too. Within the 64 those of a slab are contiguous, and of these the two of a lane's rows,
//            group and group + 8: position 16 (row / 16) + 2 (row % 8) + row / 8 % 2. Padding is zero.
//            Without zeros the zero is 2^(bits - 1).
//
// W[n][k] = (q[n][k] - zero[n][k / group_size]) * scale[n][k / group_size].
#pragma once
#include <cstdint>

namespace pelton::marlin {

#ifdef __CUDACC__
#define PELTON_BOTH __host__ __device__
#else
#define PELTON_BOTH
#endif

constexpr int kTile = 64;              // outputs and inputs of a tile
constexpr int kSlab = 16;              // outputs of an A fragment
constexpr int kSlabs = kTile / kSlab;  // of a tile
constexpr int kSteps = kTile / 16;     // A fragments along K of a slab
constexpr int kLanePart = 16;          // bytes, of one access

PELTON_BOTH constexpr int64_t tiles(int64_t size) { return (size + kTile - 1) / kTile; }
PELTON_BOTH constexpr int tile_bytes(int bits) { return kTile * kTile * bits / 8; }
PELTON_BOTH constexpr int slab_bytes(int bits) { return tile_bytes(bits) / kSlabs; }

// Where in its 64 the scale or zero of a row is.
PELTON_BOTH constexpr int scale_position(int row) {
  return kSlab * (row / kSlab) + 2 * (row % 8) + row / 8 % 2;
}

// The row (of 16) and input (of 16) of value `half` (0, 1) of fragment register i (0 to 3).
PELTON_BOTH constexpr int fragment_row(int lane, int i) { return lane / 4 + 8 * (i % 2); }
PELTON_BOTH constexpr int fragment_input(int lane, int i, int half) {
  return 2 * (lane % 4) + 8 * (i / 2) + half;
}

#undef PELTON_BOTH

}  // namespace pelton::marlin
