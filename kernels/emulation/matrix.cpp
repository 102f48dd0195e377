// Matrix operations of matrix.h. Apart from the kernels, so that the compiler does not check these accesses.
#include "internal.h"

namespace pelton::emulation {

// D[M x N] = A[M x K] * B[K x N] + C, kept in double.
template <int M, int N, int K>
struct Product {
  double a[M][K], b[K][N], d[M][N];

  void compute() {
    for (int i = 0; i < M; ++i) {
      for (int k = 0; k < K; ++k) {
        for (int j = 0; j < N; ++j) d[i][j] += a[i][k] * b[k][j];
      }
    }
  }
};

// All lanes must take part in a matrix operation.
void meet_all(const char* name, int width, const void* in, size_t in_bytes, void* out, size_t out_bytes,
              void (*finish)(Lanes&)) {
  meet({name, ~uint64_t(0), width, in_bytes, out_bytes, finish, 0, false, true}, in, out);
}

// --- NVIDIA ---

template <bool IsBf16>
void finish_m16n8k16(Lanes& lanes) {
  Product<16, 8, 16> p;
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane / 4, pair = lane % 4;
    for (int i = 0; i < 8; ++i) {
      p.a[group + 8 * (i / 2 % 2)][2 * pair + i % 2 + 8 * (i / 4)] =
          half_value<IsBf16>(lanes.input<uint16_t>(lane, 2 * i));
    }
    for (int i = 0; i < 4; ++i) {
      p.b[2 * pair + i % 2 + 8 * (i / 2)][group] =
          half_value<IsBf16>(lanes.input<uint16_t>(lane, 16 + 2 * i));
      p.d[group + 8 * (i / 2)][2 * pair + i % 2] = lanes.input<float>(lane, 24 + 4 * i);
    }
  }
  p.compute();
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      lanes.output(lane, float(p.d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2]), 4 * i);
    }
  }
}

template <bool IsBf16>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct {
    uint32_t a[4], b[2];
    float d[4];
  } in;
  memcpy(in.a, a, sizeof in.a);
  memcpy(in.b, b, sizeof in.b);
  memcpy(in.d, d, sizeof in.d);
  meet_all("mma.sync.m16n8k16", 32, &in, sizeof in, d, sizeof d, finish_m16n8k16<IsBf16>);
}

template <int Count, bool Transposed>
void finish_ldmatrix(Lanes& lanes) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int m = 0; m < Count; ++m) {
      for (int i = 0; i < 2; ++i) {
        const int row = Transposed ? 2 * (lane % 4) + i : lane / 4;
        const int column = Transposed ? lane / 4 : 2 * (lane % 4) + i;
        lanes.output(lane, lanes.input<uint16_t>(8 * m + row, 2 * column), 4 * m + 2 * i);
      }
    }
  }
}

template <int Count, bool Transposed>
void load_matrix(uint32_t (&r)[Count], const void* row) {
  unsigned char bytes[16] = {};
  if (lane_of(32) < 8 * Count) read_matrix_row(row, bytes, __builtin_return_address(0));
  meet_all("ldmatrix", 32, bytes, sizeof bytes, r, sizeof r, finish_ldmatrix<Count, Transposed>);
}
// --- AMD ---

// The row of C and D that element i of a lane belongs to.
template <int Size>
constexpr int mfma_row(int lane, int i) {
  return Size == 16 ? 4 * (lane / 16) + i : 8 * (i / 4) + 4 * (lane / 32) + i % 4;
}
template <int Size>
constexpr int kMfmaDepth = Size == 16 ? 16 : 8;
template <int Size>
struct MfmaInput {
  uint16_t a[4], b[4];
};

template <int Size, bool IsBf16>
void finish_mfma(Lanes& lanes) {
  Product<Size, Size, kMfmaDepth<Size>> p{};
  for (int lane = 0; lane < 64; ++lane) {
    const auto in = lanes.input<MfmaInput<Size>>(lane);
    for (int i = 0; i < 4; ++i) {
      p.a[lane % Size][4 * (lane / Size) + i] = half_value<IsBf16>(in.a[i]);
      p.b[4 * (lane / Size) + i][lane % Size] = half_value<IsBf16>(in.b[i]);
    }
    for (int i = 0; i < kMfmaSums<Size>; ++i) {
      p.d[mfma_row<Size>(lane, i)][lane % Size] = lanes.input<float>(lane, 16 + 4 * i);
    }
  }
  p.compute();
  for (int lane = 0; lane < 64; ++lane) {
    for (int i = 0; i < kMfmaSums<Size>; ++i) {
      lanes.output(lane, float(p.d[mfma_row<Size>(lane, i)][lane % Size]), 4 * i);
    }
  }
}

template <int Size, bool IsBf16>
void mfma(float (&d)[kMfmaSums<Size>], const uint16_t (&a)[4], const uint16_t (&b)[4]) {
  unsigned char in[16 + sizeof d];
  memcpy(in, a, 8);
  memcpy(in + 8, b, 8);
  memcpy(in + 16, d, sizeof d);
  meet_all(Size == 16 ? "mfma_f32_16x16x16" : "mfma_f32_32x32x8", 64, in, sizeof in, d, sizeof d,
           finish_mfma<Size, IsBf16>);
}

template <bool IsBf16>
void finish_wmma(Lanes& lanes) {
  Product<16, 16, 16> p{};
  for (int lane = 0; lane < 32; ++lane) {
    if (memcmp(lanes.in[lane], lanes.in[lane % 16], 64) != 0) {
      fail(
          "wmma_f32_16x16x16: lane %d brings another A or B than lane %d; both halves of the wave must bring "
          "the same",
          lane, lane % 16);
    }
    for (int i = 0; i < 16; ++i) {
      p.a[lane % 16][i] = half_value<IsBf16>(lanes.input<uint16_t>(lane, 2 * i));
      p.b[i][lane % 16] = half_value<IsBf16>(lanes.input<uint16_t>(lane, 32 + 2 * i));
    }
    for (int i = 0; i < 8; ++i) p.d[2 * i + lane / 16][lane % 16] = lanes.input<float>(lane, 64 + 4 * i);
  }
  p.compute();
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 8; ++i) lanes.output(lane, float(p.d[2 * i + lane / 16][lane % 16]), 4 * i);
  }
}

template <bool IsBf16>
void wmma(float (&d)[8], const uint16_t (&a)[16], const uint16_t (&b)[16]) {
  struct {
    uint16_t a[16], b[16];
    float d[8];
  } in;
  memcpy(in.a, a, sizeof in.a);
  memcpy(in.b, b, sizeof in.b);
  memcpy(in.d, d, sizeof in.d);
  meet_all("wmma_f32_16x16x16", 32, &in, sizeof in, d, sizeof d, finish_wmma<IsBf16>);
}

template void mma_m16n8k16<false>(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2]);
template void mma_m16n8k16<true>(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2]);
template void load_matrix<1, false>(uint32_t (&)[1], const void*);
template void load_matrix<1, true>(uint32_t (&)[1], const void*);
template void load_matrix<2, false>(uint32_t (&)[2], const void*);
template void load_matrix<2, true>(uint32_t (&)[2], const void*);
template void load_matrix<4, false>(uint32_t (&)[4], const void*);
template void load_matrix<4, true>(uint32_t (&)[4], const void*);
template void mfma<16, false>(float (&)[4], const uint16_t (&)[4], const uint16_t (&)[4]);
template void mfma<16, true>(float (&)[4], const uint16_t (&)[4], const uint16_t (&)[4]);
template void mfma<32, false>(float (&)[16], const uint16_t (&)[4], const uint16_t (&)[4]);
template void mfma<32, true>(float (&)[16], const uint16_t (&)[4], const uint16_t (&)[4]);
template void wmma<false>(float (&)[8], const uint16_t (&)[16], const uint16_t (&)[16]);
template void wmma<true>(float (&)[8], const uint16_t (&)[16], const uint16_t (&)[16]);

}  // namespace pelton::emulation
