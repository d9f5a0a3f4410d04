// The one header that kernels include: what the machine offers, in our words.
//
// Compiled by nvcc each function is one PTX instruction. Compiled by g++ it is a call into csrc/emulation, which runs the same
// kernel on the CPU and reports races, stray accesses and stuck barriers. Inline assembly lives in this folder's platform
// headers only (platform, mma, async_copy, hopper, wgmma).
//
// Shared memory is addressed in two ways: by pointer for plain loads and stores, and by 32-bit address (`shared_address`) for
// ldmatrix, cp.async, mbarriers and descriptors.
#pragma once

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#define PK_DEVICE __device__ __forceinline__
// Declares `name`, the block's dynamic shared memory: aligned for every use, 128-byte swizzled tiles included.
#define PK_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

namespace pk::device {

PK_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Named barriers: ids 1 to 15 (0 is __syncthreads); `threads` counts whole warps.
PK_DEVICE void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
PK_DEVICE void barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Approximations of the special function unit; denormals flush to zero.
PK_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PK_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PK_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PK_DEVICE float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 128-bit accesses; the address is a multiple of 16. `stream`: read once, keep it out of the way of what is reused.
PK_DEVICE uint4 load_global_128(const void* p) { return *static_cast<const uint4*>(p); }
PK_DEVICE uint4 load_global_128_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(p)));
  return v;
}
PK_DEVICE void store_global_128(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }
PK_DEVICE uint4 load_shared_128(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
PK_DEVICE void store_shared_128(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
PK_DEVICE uint32_t load_shared_32(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
PK_DEVICE void store_shared_32(uint32_t address, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory"); }

PK_DEVICE float2 load_shared_float2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

// x, of which the compiler knows nothing: what follows from it is worked out here, and not kept in registers from before a loop.
PK_DEVICE int hidden(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// A turn of a spin loop.
PK_DEVICE void spin_hint() { __nanosleep(20); }

template <class T>
PK_DEVICE uint32_t bits_of(T pair) {
  static_assert(sizeof(T) == 4);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// a * b + c of pairs of T.
template <class T>
PK_DEVICE uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c);
template <>
PK_DEVICE uint32_t multiply_add<__half>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
template <>
PK_DEVICE uint32_t multiply_add<__nv_bfloat16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

}  // namespace pk::device

#else  // the emulation

#include "emulation/builtins.h"

#define PK_DEVICE inline __attribute__((always_inline))
#define PK_DYNAMIC_SHARED(name) unsigned char* const name = ::emu::self().shared

namespace pk::device {

inline uint32_t shared_address(const void* p, EMU_HERE) { return emu::shared_address(p, EMU_SITE); }
inline void barrier_sync(int id, int threads, EMU_HERE) { emu::barrier_sync(id, threads, EMU_SITE); }
inline void barrier_arrive(int id, int threads, EMU_HERE) { emu::barrier_arrive(id, threads, EMU_SITE); }

inline float flush(float y) { return fabsf(y) < 1.17549435e-38f ? copysignf(0.f, y) : y; }
inline float exp2_approx(float x) { return flush(::exp2f(flush(x))); }
inline float log2_approx(float x) { return ::log2f(flush(x)); }
inline float reciprocal_approx(float x) { return flush(1.f / flush(x)); }
inline float tanh_approx(float x) { return ::tanhf(x); }

PK_DEVICE uint4 load_global_128(const void* p) { return emu::load_vector(p); }
PK_DEVICE uint4 load_global_128_stream(const void* p) { return emu::load_vector(p); }
PK_DEVICE void store_global_128(void* p, uint4 v) { emu::store_vector(p, v); }
PK_DEVICE uint4 load_shared_128(uint32_t address) { return emu::load_vector(::emu::self().shared + address); }
PK_DEVICE void store_shared_128(uint32_t address, uint4 v) { emu::store_vector(::emu::self().shared + address, v); }
PK_DEVICE uint32_t load_shared_32(uint32_t address) { return *reinterpret_cast<const uint32_t*>(::emu::self().shared + address); }
PK_DEVICE void store_shared_32(uint32_t address, uint32_t v) { *reinterpret_cast<uint32_t*>(::emu::self().shared + address) = v; }
PK_DEVICE float2 load_shared_float2(uint32_t address) { return *reinterpret_cast<const float2*>(::emu::self().shared + address); }

PK_DEVICE int hidden(int x) { return x; }

inline void spin_hint(EMU_HERE) { emu::yield(EMU_SITE); }

template <class T>
PK_DEVICE uint32_t bits_of(T pair) {
  static_assert(sizeof(T) == 4);
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

template <class T>
inline uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162> x[3];
  const uint32_t bits[3] = {a, b, c};
  memcpy(static_cast<void*>(x), bits, sizeof x);
  return bits_of(__hfma2(x[0], x[1], x[2]));
}

}  // namespace pk::device

#endif

namespace pk::device {

inline constexpr unsigned kFullWarp = 0xffffffffu;

// Two floats rounded to nearest even and packed, `low` in the low half.
template <class T>
PK_DEVICE uint32_t pack(float low, float high);
template <>
PK_DEVICE uint32_t pack<__half>(float low, float high) {
  return bits_of(__floats2half2_rn(low, high));
}
template <>
PK_DEVICE uint32_t pack<__nv_bfloat16>(float low, float high) {
  return bits_of(__floats2bfloat162_rn(low, high));
}

}  // namespace pk::device

#include "async_copy.cuh"
#include "hopper.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
