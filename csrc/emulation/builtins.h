// CUDA C++ as g++ sees it: keywords, indices, warp intrinsics, atomics and the device functions that the toolkit's headers
// declare for nvcc only. Comes before any CUDA header, because those keep an earlier definition of the keywords.
#pragma once
#ifdef __CUDACC__
#error "csrc/emulation/builtins.h is for host compilers; nvcc has these"
#endif

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static thread_local
#define __launch_bounds__(...)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <driver_types.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "device.h"

#define threadIdx (::emu::self().thread_index)
#define blockIdx (::emu::self().block_index)
#define blockDim (::emu::self().block_dim)
#define gridDim (::emu::self().grid_dim)
inline constexpr int warpSize = 32;

// -- barriers ------------------------------------------------------------------------------------------------------
inline void __syncthreads(EMU_HERE) { emu::sync_threads(EMU_SITE); }
inline int __syncthreads_count(int p, EMU_HERE) { return emu::sync_threads_reduce(p, 0, EMU_SITE); }
inline int __syncthreads_and(int p, EMU_HERE) { return emu::sync_threads_reduce(p, 1, EMU_SITE); }
inline int __syncthreads_or(int p, EMU_HERE) { return emu::sync_threads_reduce(p, 2, EMU_SITE); }
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_HERE) { emu::sync_warp(mask, EMU_SITE); }
inline void __threadfence() { emu::memory_fence(); }
inline void __threadfence_block() { emu::memory_fence(); }
inline void __nanosleep(unsigned, EMU_HERE) { emu::yield(EMU_SITE); }

// -- warp collectives ----------------------------------------------------------------------------------------------
namespace emu {
template <class T>
inline T shuffle_value(unsigned mask, T value, Shuffle kind, int operand, int width, Site where) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "shuffles move up to 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = shuffle(mask, bits, kind, operand, width, where);
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}
template <class T>
inline uint64_t match_key(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
}  // namespace emu

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMU_HERE) {
  return emu::shuffle_value(mask, value, emu::Shuffle::index, lane, width, EMU_SITE);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_HERE) {
  return emu::shuffle_value(mask, value, emu::Shuffle::up, static_cast<int>(delta), width, EMU_SITE);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_HERE) {
  return emu::shuffle_value(mask, value, emu::Shuffle::down, static_cast<int>(delta), width, EMU_SITE);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMU_HERE) {
  return emu::shuffle_value(mask, value, emu::Shuffle::exclusive_or, lanes, width, EMU_SITE);
}
inline unsigned __ballot_sync(unsigned mask, int p, EMU_HERE) { return emu::ballot(mask, p != 0, EMU_SITE); }
inline int __any_sync(unsigned mask, int p, EMU_HERE) { return emu::ballot(mask, p != 0, EMU_SITE) != 0; }
inline int __all_sync(unsigned mask, int p, EMU_HERE) { return emu::ballot(mask, p == 0, EMU_SITE) == 0; }
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, EMU_HERE) {
  return emu::match_any(mask, emu::match_key(value), EMU_SITE);
}
template <class T>
inline unsigned __match_all_sync(unsigned mask, T value, int* all, EMU_HERE) {
  const unsigned same = emu::match_any(mask, emu::match_key(value), EMU_SITE);
  *all = same == mask;
  return *all ? mask : 0;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v, EMU_HERE) { return emu::reduce(mask, v, emu::Reduce::add, EMU_SITE); }
inline int __reduce_add_sync(unsigned mask, int v, EMU_HERE) {
  return static_cast<int>(emu::reduce(mask, static_cast<uint32_t>(v), emu::Reduce::add, EMU_SITE));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v, EMU_HERE) { return emu::reduce(mask, v, emu::Reduce::min, EMU_SITE); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned v, EMU_HERE) { return emu::reduce(mask, v, emu::Reduce::max, EMU_SITE); }
inline int __reduce_min_sync(unsigned mask, int v, EMU_HERE) {
  return static_cast<int>(emu::reduce(mask, static_cast<uint32_t>(v), emu::Reduce::min_signed, EMU_SITE));
}
inline int __reduce_max_sync(unsigned mask, int v, EMU_HERE) {
  return static_cast<int>(emu::reduce(mask, static_cast<uint32_t>(v), emu::Reduce::max_signed, EMU_SITE));
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned v, EMU_HERE) { return emu::reduce(mask, v, emu::Reduce::bit_and, EMU_SITE); }
inline unsigned __reduce_or_sync(unsigned mask, unsigned v, EMU_HERE) { return emu::reduce(mask, v, emu::Reduce::bit_or, EMU_SITE); }
inline unsigned __reduce_xor_sync(unsigned mask, unsigned v, EMU_HERE) { return emu::reduce(mask, v, emu::Reduce::bit_xor, EMU_SITE); }
inline unsigned __activemask() { return emu::active_mask(); }

// -- atomics -------------------------------------------------------------------------------------------------------
namespace emu {
template <class T, class F>
inline T atomic_update(T* p, F f, Site where) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  using Word = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  const auto update = [](Word old, const void* operand) {
    T value;
    std::memcpy(static_cast<void*>(&value), &old, sizeof value);
    value = (*static_cast<const F*>(operand))(value);
    std::memcpy(&old, &value, sizeof old);
    return old;
  };
  Word old;
  if constexpr (sizeof(T) == 4)
    old = atomic_u32(p, update, &f, where);
  else
    old = atomic_u64(p, update, &f, where);
  T before;
  std::memcpy(static_cast<void*>(&before), &old, sizeof before);
  return before;
}
}  // namespace emu
template <class T>
inline T atomicAdd(T* p, T v, EMU_HERE) {
  return emu::atomic_update(p, [v](T old) { return old + v; }, EMU_SITE);
}
template <class T>
inline T atomicMax(T* p, T v, EMU_HERE) {
  return emu::atomic_update(p, [v](T old) { return old < v ? v : old; }, EMU_SITE);
}
template <class T>
inline T atomicMin(T* p, T v, EMU_HERE) {
  return emu::atomic_update(p, [v](T old) { return v < old ? v : old; }, EMU_SITE);
}
template <class T>
inline T atomicExch(T* p, T v, EMU_HERE) {
  return emu::atomic_update(p, [v](T) { return v; }, EMU_SITE);
}
template <class T>
inline T atomicOr(T* p, T v, EMU_HERE) {
  return emu::atomic_update(p, [v](T old) { return old | v; }, EMU_SITE);
}
template <class T>
inline T atomicAnd(T* p, T v, EMU_HERE) {
  return emu::atomic_update(p, [v](T old) { return old & v; }, EMU_SITE);
}
template <class T>
inline T atomicCAS(T* p, T expected, T v, EMU_HERE) {
  return emu::atomic_update(p, [expected, v](T old) { return old == expected ? v : old; }, EMU_SITE);
}
inline unsigned atomicInc(unsigned* p, unsigned limit, EMU_HERE) {
  return emu::atomic_update(p, [limit](unsigned old) { return old >= limit ? 0u : old + 1u; }, EMU_SITE);
}

// -- loads with a cache hint are loads -----------------------------------------------------------------------------
template <class T>
inline T __ldg(const T* p) {
  return *p;
}
template <class T>
inline T __ldcs(const T* p) {
  return *p;
}
template <class T>
inline T __ldcg(const T* p) {
  return *p;
}
template <class T>
inline void __stcs(T* p, T v) {
  *p = v;
}
template <class T>
inline void __stcg(T* p, T v) {
  *p = v;
}

// -- 128-bit accesses ----------------------------------------------------------------------------------------------
// Through a vector type, so that the compiler sees one 16-byte access (and its hook one aligned one).
namespace emu {
typedef unsigned int Vector __attribute__((vector_size(16), may_alias));
__forceinline__ uint4 load_vector(const void* p) {
  const Vector v = *static_cast<const Vector*>(p);
  return make_uint4(v[0], v[1], v[2], v[3]);
}
__forceinline__ void store_vector(void* p, uint4 v) { *static_cast<Vector*>(p) = Vector{v.x, v.y, v.z, v.w}; }
}  // namespace emu

#include "builtins_math.h"
