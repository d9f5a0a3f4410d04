// cp.async: copies from global to shared memory that the thread waits for in groups. Included by platform.cuh.
#pragma once

namespace pk::device {

#ifdef __CUDACC__

// 16 bytes, past L1. Not `valid`: nothing is read and zeros are written; the address must still be a legal one.
PK_DEVICE void cp_async_16(uint32_t to, const void* from, bool valid = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
               : "memory");
}
// The first `bytes` (0 to 16) of 16, through L1 for what other warps read too; the rest is zeros.
PK_DEVICE void cp_async_16_part(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
}
// 4 or 8 bytes, for rows whose alignment allows no more.
template <int Bytes>
PK_DEVICE void cp_async_narrow(uint32_t to, const void* from, bool valid = true) {
  static_assert(Bytes == 4 || Bytes == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "n"(Bytes),
               "r"(valid ? Bytes : 0)
               : "memory");
}
PK_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `Left` of this thread's groups are in flight.
template <int Left>
PK_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}
// The mbarrier is arrived at once for this thread, when its copies so far have landed. sm_80 upward.
PK_DEVICE void cp_async_arrive(uint32_t mbarrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(mbarrier) : "memory");
}

#else

inline void cp_async_16(uint32_t to, const void* from, bool valid = true, EMU_HERE) {
  emu::async_copy(to, from, 16, valid ? 16 : 0, EMU_SITE);
}
inline void cp_async_16_part(uint32_t to, const void* from, int bytes, EMU_HERE) { emu::async_copy(to, from, 16, bytes, EMU_SITE); }
template <int Bytes>
inline void cp_async_narrow(uint32_t to, const void* from, bool valid = true, EMU_HERE) {
  static_assert(Bytes == 4 || Bytes == 8);
  emu::async_copy(to, from, Bytes, valid ? Bytes : 0, EMU_SITE);
}
inline void cp_async_commit() { emu::async_commit(); }
template <int Left>
inline void cp_async_wait() {
  emu::async_wait(Left);
}
inline void cp_async_arrive(uint32_t mbarrier, EMU_HERE) { emu::async_arrive(mbarrier, EMU_SITE); }

#endif

}  // namespace pk::device
