// sm_90: mbarriers, TMA, proxies, register budgets. Included by platform.cuh.
//
// An mbarrier's phase completes when the expected arrivals and bytes have come; waiting with parity p returns once the phase of
// parity p is complete, so consumers start with 0 and producers, whose buffers start empty, with 1.
#pragma once

#ifdef __CUDACC__
#include <cuda.h>
#endif

namespace pk::device {

#ifdef __CUDACC__

using TensorMap = CUtensorMap;

PK_DEVICE void mbarrier_init(uint32_t mbarrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(arrivals) : "memory");
}
PK_DEVICE void mbarrier_invalidate(uint32_t mbarrier) { asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(mbarrier) : "memory"); }
// After the inits, by the thread that made them, before the block's barrier.
PK_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
PK_DEVICE void mbarrier_arrive(uint32_t mbarrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(mbarrier) : "memory");
}
PK_DEVICE void mbarrier_arrive_expect(uint32_t mbarrier, uint32_t bytes) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(mbarrier), "r"(bytes) : "memory");
}
PK_DEVICE void mbarrier_expect(uint32_t mbarrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(bytes) : "memory");
}
PK_DEVICE bool mbarrier_try_wait(uint32_t mbarrier, int parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(mbarrier), "r"(parity)
               : "memory");
  return done != 0;
}
PK_DEVICE void mbarrier_wait(uint32_t mbarrier, int parity) {
  while (!mbarrier_try_wait(mbarrier, parity)) {}
}
// This thread's plain stores to shared memory become visible to TMA stores and wgmma.
PK_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

PK_DEVICE void tensor_map_prefetch(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// A box of the tensor at (c0 innermost, ...) into shared memory; elements outside the tensor are zero. The box's bytes
// complete on the mbarrier.
PK_DEVICE void tma_load(uint32_t to, const TensorMap* map, uint32_t mbarrier, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4}], [%2];" ::"r"(to), "l"(map),
               "r"(mbarrier), "r"(c0), "r"(c1)
               : "memory");
}
PK_DEVICE void tma_load(uint32_t to, const TensorMap* map, uint32_t mbarrier, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5}], [%2];" ::"r"(to),
               "l"(map), "r"(mbarrier), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
PK_DEVICE void tma_load(uint32_t to, const TensorMap* map, uint32_t mbarrier, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], [%2];" ::"r"(to),
               "l"(map), "r"(mbarrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
PK_DEVICE void tma_store(const TensorMap* map, uint32_t from, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2,%3}], [%1];" ::"l"(map), "r"(from), "r"(c0), "r"(c1)
               : "memory");
}
PK_DEVICE void tma_store(const TensorMap* map, uint32_t from, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2,%3,%4}], [%1];" ::"l"(map), "r"(from), "r"(c0), "r"(c1),
               "r"(c2)
               : "memory");
}
PK_DEVICE void tma_store(const TensorMap* map, uint32_t from, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5}], [%1];" ::"l"(map), "r"(from), "r"(c0), "r"(c1),
               "r"(c2), "r"(c3)
               : "memory");
}
PK_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most `Left` groups still read their source.
template <int Left>
PK_DEVICE void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Left) : "memory");
}
// Plain bytes, a multiple of 16 from and to multiples of 16.
PK_DEVICE void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t mbarrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(mbarrier)
               : "memory");
}

// One lane of the converged warp.
PK_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}
// Moves registers between the warpgroups of a block; every warp of the warpgroup calls it.
template <int Registers>
PK_DEVICE void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
PK_DEVICE void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

#else

using TensorMap = emu::TensorMap;

inline void mbarrier_init(uint32_t mbarrier, int arrivals, EMU_HERE) { emu::mbarrier_init(mbarrier, arrivals, EMU_SITE); }
inline void mbarrier_invalidate(uint32_t mbarrier, EMU_HERE) { emu::mbarrier_invalidate(mbarrier, EMU_SITE); }
inline void mbarrier_init_fence() { emu::proxy_fence(); }
inline void mbarrier_arrive(uint32_t mbarrier, EMU_HERE) { emu::mbarrier_arrive(mbarrier, 1, 0, EMU_SITE); }
inline void mbarrier_arrive_expect(uint32_t mbarrier, uint32_t bytes, EMU_HERE) {
  emu::mbarrier_arrive(mbarrier, 1, static_cast<int>(bytes), EMU_SITE);
}
inline void mbarrier_expect(uint32_t mbarrier, uint32_t bytes, EMU_HERE) {
  emu::mbarrier_expect(mbarrier, static_cast<int>(bytes), EMU_SITE);
}
inline bool mbarrier_try_wait(uint32_t mbarrier, int parity, EMU_HERE) { return emu::mbarrier_test(mbarrier, parity, EMU_SITE); }
inline void mbarrier_wait(uint32_t mbarrier, int parity, EMU_HERE) { emu::mbarrier_wait(mbarrier, parity, EMU_SITE); }
inline void fence_proxy_async() { emu::proxy_fence(); }

inline void tensor_map_prefetch(const TensorMap*) {}
inline void tma_load(uint32_t to, const TensorMap* map, uint32_t mbarrier, int c0, int c1, EMU_HERE) {
  const int c[] = {c0, c1};
  emu::tensor_load(to, map, c, 2, mbarrier, EMU_SITE);
}
inline void tma_load(uint32_t to, const TensorMap* map, uint32_t mbarrier, int c0, int c1, int c2, EMU_HERE) {
  const int c[] = {c0, c1, c2};
  emu::tensor_load(to, map, c, 3, mbarrier, EMU_SITE);
}
inline void tma_load(uint32_t to, const TensorMap* map, uint32_t mbarrier, int c0, int c1, int c2, int c3, EMU_HERE) {
  const int c[] = {c0, c1, c2, c3};
  emu::tensor_load(to, map, c, 4, mbarrier, EMU_SITE);
}
inline void tma_store(const TensorMap* map, uint32_t from, int c0, int c1, EMU_HERE) {
  const int c[] = {c0, c1};
  emu::tensor_store(map, c, 2, from, EMU_SITE);
}
inline void tma_store(const TensorMap* map, uint32_t from, int c0, int c1, int c2, EMU_HERE) {
  const int c[] = {c0, c1, c2};
  emu::tensor_store(map, c, 3, from, EMU_SITE);
}
inline void tma_store(const TensorMap* map, uint32_t from, int c0, int c1, int c2, int c3, EMU_HERE) {
  const int c[] = {c0, c1, c2, c3};
  emu::tensor_store(map, c, 4, from, EMU_SITE);
}
inline void tma_store_commit() { emu::bulk_commit(); }
template <int Left>
inline void tma_store_wait() {
  emu::bulk_wait(Left);
}
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t mbarrier, EMU_HERE) {
  emu::bulk_load(to, from, bytes, mbarrier, EMU_SITE);
}

inline bool elect_one(EMU_HERE) { return emu::elect_one(~0u, EMU_SITE); }
template <int Registers>
inline void registers_increase() {
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256);
}
template <int Registers>
inline void registers_decrease() {
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256);
}

#endif

}  // namespace pk::device
