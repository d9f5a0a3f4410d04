// Tensor-core fragments of a warp: ldmatrix, stmatrix, mma.sync. Included by platform.cuh.
//
// With g = lane / 4 and q = lane % 4, in the PTX manual's layouts:
//   A (16 x 16, 16-bit): a[0] (g, 2q..), a[1] (g + 8, 2q..), a[2] (g, 2q + 8..), a[3] (g + 8, 2q + 8..)
//   B (16 x 8):          b0 (k = 2q.., column g), b1 (k = 2q + 8.., column g)
//   C, D (16 x 8):       d[0..1] (g, 2q..), d[2..3] (g + 8, 2q..)
// 8-bit A and B (k = 32): the same with 4q and steps of 16.
#pragma once

namespace pk::device {

#ifdef __CUDACC__

// 8x8 matrices of 16-bit elements; lane 8m + i gives the address of row i of matrix m. `_trans`: each matrix transposed.
PK_DEVICE void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
PK_DEVICE void ldmatrix(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}
PK_DEVICE void ldmatrix(uint32_t (&r)[1], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(address) : "memory");
}
PK_DEVICE void ldmatrix_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
PK_DEVICE void ldmatrix_trans(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}
PK_DEVICE void ldmatrix_trans(uint32_t (&r)[1], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(address) : "memory");
}

// sm_90 upward.
PK_DEVICE void stmatrix(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
PK_DEVICE void stmatrix(uint32_t address, const uint32_t (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(r[0]), "r"(r[1]) : "memory");
}
PK_DEVICE void stmatrix_trans(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}

#define PK_MMA_F32(SHAPE, TYPE, A)                                     \
  asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "          \
               "{%0,%1,%2,%3};"                                        \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])        \
               : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(b0), "r"(b1))

// d += A B. m16n8k16, 16-bit operands, float accumulators.
template <class T>
PK_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
PK_DEVICE void mma<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  PK_MMA_F32("m16n8k16", "f16", a);
}
template <>
PK_DEVICE void mma<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  PK_MMA_F32("m16n8k16", "bf16", a);
}

// m16n8k8: the first half of k only.
template <class T>
PK_DEVICE void mma_k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b0);
template <>
PK_DEVICE void mma_k8<__half>(float (&d)[4], const uint32_t (&a)[2], uint32_t b0) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b0));
}
template <>
PK_DEVICE void mma_k8<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[2], uint32_t b0) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b0));
}

// m16n8k32, float8 operands: sm_89 upward.
template <>
PK_DEVICE void mma<__nv_fp8_e4m3>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  PK_MMA_F32("m16n8k32", "e4m3", a);
}
#undef PK_MMA_F32

// m16n8k32, int8 operands, int32 accumulators.
PK_DEVICE void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#else

template <int N>
inline void ldmatrix(uint32_t (&r)[N], uint32_t address, EMU_HERE) {
  emu::ldmatrix(r, N, address, false, EMU_SITE);
}
template <int N>
inline void ldmatrix_trans(uint32_t (&r)[N], uint32_t address, EMU_HERE) {
  emu::ldmatrix(r, N, address, true, EMU_SITE);
}
template <int N>
inline void stmatrix(uint32_t address, const uint32_t (&r)[N], EMU_HERE) {
  emu::stmatrix(address, r, N, false, EMU_SITE);
}
template <int N>
inline void stmatrix_trans(uint32_t address, const uint32_t (&r)[N], EMU_HERE) {
  emu::stmatrix(address, r, N, true, EMU_SITE);
}

template <class T>
constexpr emu::Element element_of() {
  if constexpr (std::is_same_v<T, __half>)
    return emu::Element::f16;
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return emu::Element::bf16;
  else {
    static_assert(std::is_same_v<T, __nv_fp8_e4m3>, "no tensor-core product of this type");
    return emu::Element::e4m3;
  }
}

template <class T>
inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_HERE) {
  const uint32_t b[2] = {b0, b1};
  emu::mma(d, a, b, d, sizeof(T) == 1 ? 32 : 16, element_of<T>(), EMU_SITE);
}
template <class T>
inline void mma_k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b0, EMU_HERE) {
  emu::mma(d, a, &b0, d, 8, element_of<T>(), EMU_SITE);
}
inline void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_HERE) {
  const uint32_t b[2] = {b0, b1};
  emu::mma(d, a, b, d, 32, EMU_SITE);
}

#endif

}  // namespace pk::device
