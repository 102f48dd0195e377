// Matrix instructions and asynchronous copies of sm_80 and later, as functions. The emulation runs them by
// their definition (PTX ISA, "Warp-level matrix instructions" and "Data movement and conversion
// instructions").
#pragma once
#include "gpu.cuh"

#if defined(PELTON_CUDA) || defined(PELTON_EMULATION)
namespace pelton::gpu {

// An address in shared memory as instructions take it. Tiles are aligned, so that bits of it may be flipped.
#ifdef PELTON_CUDA
using SharedAddress = uint32_t;
__device__ __forceinline__ SharedAddress shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}
#else
using SharedAddress = uintptr_t;
__device__ __forceinline__ SharedAddress shared_address(const void* p) {
  return reinterpret_cast<uintptr_t>(p);
}
#endif

// 2^x to two units in the last place.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef PELTON_CUDA
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return exp2f(x);
#endif
}

// Arithmetic on two half-precision values in a register, each rounded to nearest.
template <class T>
__device__ __forceinline__ uint32_t multiply_add2(uint32_t a, uint32_t b, uint32_t c) {
#ifdef PELTON_CUDA
  uint32_t d;
  if constexpr (T::is_bf16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
#else
  const auto half = [&](int shift) {
    const auto value = [&](uint32_t pair) { return to_float(T{uint16_t(pair >> shift)}); };
    return value(a) * value(b) + value(c);
  };
  return pack2<T>(half(0), half(16));
#endif
}
template <class T>
__device__ __forceinline__ uint32_t add2(uint32_t a, uint32_t b) {
  if constexpr (T::is_bf16) {
    return multiply_add2<T>(a, 0x3f803f80u, b);  // sm_80 has no other
  } else {
#ifdef PELTON_CUDA
    uint32_t d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return multiply_add2<T>(a, 0x3c003c00u, b);
#endif
  }
}

// For sm_90: sm_80 has no such product of bf16.
template <class T>
__device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b) {
#ifdef PELTON_CUDA
  uint32_t d;
  if constexpr (T::is_bf16) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  }
  return d;
#else
  return multiply_add2<T>(a, b, 0x80008000u);
#endif
}

// (a & mask) | bits in one instruction, which compilers do not find when both are constants.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
#ifdef PELTON_CUDA
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
#else
  return (a & mask) | bits;
#endif
}

// D[16 x 8] += A[16 x 16] * B[16 x 8] for one warp; T is f16 or bf16, D fp32. With group = lane / 4, pair =
// lane % 4:
//   d[0..1]: row group,     columns 2 pair, 2 pair + 1;  d[2..3]: row group + 8
//   a[0]: row group, columns 2 pair, + 1;  a[1]: row group + 8;  a[2], a[3]: the same rows, columns + 8
//   b[0]: rows 2 pair, + 1 of column group;  b[1]: rows + 8
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef PELTON_EMULATION
  emulation::mma_m16n8k16<T::is_bf16>(d, a, b);
#else
  if constexpr (T::is_bf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#endif
}

// Four 8x8 matrices of 16-bit elements from shared memory: lane i gives the address of row i % 8 of matrix i
// / 8 (16 bytes, aligned); afterwards r[m] holds of matrix m the elements 2 (lane % 4), + 1 of row lane / 4,
// or, with Transposed, of column lane / 4.
template <bool Transposed>
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], SharedAddress row) {
#ifdef PELTON_EMULATION
  emulation::load_matrix_x4<Transposed>(r, reinterpret_cast<const void*>(row));
#else
  if constexpr (Transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  }
#endif
}
template <bool Transposed>
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], const void* row) {
  load_matrix_x4<Transposed>(r, shared_address(row));
}

// An 8x8 matrix of 16-bit elements that a warp holds as load_matrix_x4 gives it, transposed.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t r) {
#ifdef PELTON_CUDA
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r));
  return transposed;
#else
  // Element (i, j) is half j % 2 of lane 4 i + j / 2; this lane wants (2 pair, group) and (2 pair + 1,
  // group).
  const int lane = threadIdx.x % kWarp, group = lane / 4, pair = lane % 4;
  const uint32_t low = shuffle(r, 8 * pair + group / 2), high = shuffle(r, 8 * pair + 4 + group / 2);
  return group % 2 == 0 ? (low & 0xffffu) | high << 16 : low >> 16 | (high & 0xffff0000u);
#endif
}

// Starts to copy 16 bytes from global to shared memory, past L1. When not `valid`, nothing is read and the 16
// bytes become zero.
__device__ __forceinline__ void copy_async16(SharedAddress shared, const void* global, bool valid) {
#ifdef PELTON_EMULATION
  emulation::copy_async16(reinterpret_cast<void*>(shared), global, valid);
#else
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
#endif
}
__device__ __forceinline__ void copy_async16(SharedAddress shared, const void* global) {
#ifdef PELTON_EMULATION
  emulation::copy_async16(reinterpret_cast<void*>(shared), global, true);
#else
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
#endif
}
__device__ __forceinline__ void copy_async16(void* shared, const void* global, bool valid = true) {
  copy_async16(shared_address(shared), global, valid);
}

// Starts to bring 128 bytes of global memory into the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* global) {
#ifdef PELTON_CUDA
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
#endif
}

// Closes the group of this thread's copies since the last one.
__device__ __forceinline__ void copy_async_commit() {
#ifdef PELTON_EMULATION
  emulation::copy_async_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most Pending of this thread's groups are unfinished. Other threads see the copies after a
// barrier.
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
#ifdef PELTON_EMULATION
  emulation::copy_async_wait(Pending);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

}  // namespace pelton::gpu
#endif
