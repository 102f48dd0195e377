// Matrix operations by the definition of their fragments: the PTX ISA ("Warp-level matrix instructions"), and
// AMD's ISA documents of CDNA 2 (MFMA) and RDNA 3 (WMMA). Sums are exact up to the final rounding to fp32.
// Included by emulation.h.
#pragma once

namespace pelton::emulation {

// --- NVIDIA ---

// mma.sync.aligned.m16n8k16.row.col: D[16 x 8] += A[16 x 16] * B[16 x 8]. With group = lane / 4 and pair =
// lane % 4, element i of a lane is
//   A, i = 0..7: row group + 8 (i / 2 % 2), column 2 pair + i % 2 + 8 (i / 4)
//   B, i = 0..3: row 2 pair + i % 2 + 8 (i / 2), column group
//   D, i = 0..3: row group + 8 (i / 2), column 2 pair + i % 2
template <bool IsBf16>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

// ldmatrix: Count matrices of 8 x 8 elements of 16 bits; lanes 8 m to 8 m + 7 name the rows of matrix m, 16
// bytes each in shared memory, aligned. Element i of r[m] is that of row lane / 4 and column 2 (lane % 4) +
// i, or the other way round when Transposed.
template <int Count, bool Transposed>
void load_matrix(uint32_t (&r)[Count], const void* row);
template <bool Transposed>
void load_matrix_x1(uint32_t (&r)[1], const void* row) {
  load_matrix<1, Transposed>(r, row);
}
template <bool Transposed>
void load_matrix_x2(uint32_t (&r)[2], const void* row) {
  load_matrix<2, Transposed>(r, row);
}
template <bool Transposed>
void load_matrix_x4(uint32_t (&r)[4], const void* row) {
  load_matrix<4, Transposed>(r, row);
}

// A row for ldmatrix, checked as a read of shared memory by the calling lane, at this place in its kernel.
void read_matrix_row(const void* row, unsigned char (&bytes)[16], const void* place);

// --- AMD ---

template <int Size>
constexpr int kMfmaSums = Size * Size / 64;

// v_mfma_f32_16x16x16_f16 and _bf16_1k on a wave of 64: D += A * B. Element i of a lane is
//   A: row lane % 16, column 4 (lane / 16) + i;  B: row 4 (lane / 16) + i, column lane % 16
//   D: row 4 (lane / 16) + i, column lane % 16
// v_mfma_f32_32x32x8_f16 and _bf16_1k: the same with 32 for 16 in A and B, and
//   D, i = 0..15: row 8 (i / 4) + 4 (lane / 32) + i % 4, column lane % 32
template <int Size, bool IsBf16>
void mfma(float (&d)[kMfmaSums<Size>], const uint16_t (&a)[4], const uint16_t (&b)[4]);

// v_wmma_f32_16x16x16_f16 and _bf16 on a wave of 32: D += A * B. Lanes 16 to 31 bring the same A and B as
// lanes 0 to 15, which is checked. Element i of a lane is
//   A, i = 0..15: row lane % 16, column i;  B: row i, column lane % 16
//   D, i = 0..7: row 2 i + lane / 16, column lane % 16
template <bool IsBf16>
void wmma(float (&d)[8], const uint16_t (&a)[16], const uint16_t (&b)[16]);

}  // namespace pelton::emulation
