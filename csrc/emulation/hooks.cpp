// The compiler's memory hooks: kernels built with -fsanitize=thread call these before every load and store that optimisation
// left. libtsan is not linked; the functions are ours.
#include <cstdint>

#include "block.h"
#include "memory.h"

namespace emu {
namespace {

void global_access(Block& b, const void* p, size_t n, bool write, Site where) {
  const auto* c = static_cast<const unsigned char*>(p);
  const Range* range = find_range(p, n);
  if (range) {
    if (write && !range->writable) {
      b.fault(FaultKind::read_only_write, where, 0, -1, "write of %zu bytes into the input `%s` at byte %td", n, range->label.c_str(),
              c - range->base);
    }
    if (b.settings.profile)
      b.profile.record(fiber()->warp, fiber()->lane, b.warps[fiber()->warp].alive, false, write, reinterpret_cast<uintptr_t>(p),
                       static_cast<int>(n), where);
    // Threads that talk through global memory deserve other interleavings than those between barriers.
    if (b.settings.schedule == Schedule::random && b.random() % 64 == 0) b.yield_current(where);
    return;
  }
  if (c >= b.static_shared && c < b.static_shared + b.static_bytes) {
    b.touch_static(write ? Touch::write : Touch::read, static_cast<size_t>(c - b.static_shared), n, where);
    return;
  }
  const auto* closure = static_cast<const unsigned char*>(b.spec->closure);
  if (!write && ((c >= closure && c + n <= closure + b.spec->closure_bytes) || (c >= b.module_low && c < b.module_high))) return;
  b.fault(FaultKind::global_out_of_bounds, where, 0, -1, "%s of %zu bytes: %s", write ? "write" : "read", n,
          describe_address(p, n).c_str());
}

// Registers of wgmmas in flight live on the fiber's stack: nobody may look at them before the wait.
void stack_access(Block& b, Fiber& f, const unsigned char* c, size_t n, Site where) {
  for (const auto& [low, high] : f.accumulators) {
    if (c < high && c + n > low) {
      b.fault(FaultKind::wgmma, where, 0, -1, "accumulator registers used while a wgmma on them is in flight (missing wgmma wait)");
      return;
    }
  }
}

void access(const void* p, size_t n, bool write, bool aligned, const void* return_address) {
  Fiber* f = fiber();
  if (!f) return;  // host code
  Block& b = *block();
  const auto* c = static_cast<const unsigned char*>(p);
  const Site where = site(return_address);
  if (f->stack.contains(p)) {
    if (!f->accumulators.empty()) stack_access(b, *f, c, n, where);
    return;
  }
  const auto* context = reinterpret_cast<const unsigned char*>(static_cast<const ThreadContext*>(f));
  if (c >= context && c + n <= context + sizeof(ThreadContext)) return;  // threadIdx and its kin
  if (aligned && reinterpret_cast<uintptr_t>(p) % n != 0) {
    b.fault(FaultKind::misaligned, where, 0, -1, "%s of %zu bytes at an address that is not a multiple of %zu", write ? "write" : "read", n,
            n);
  }
  const ptrdiff_t offset = c - b.shared;
  if (offset >= -static_cast<ptrdiff_t>(64 << 10) && offset < static_cast<ptrdiff_t>(b.shared_capacity)) {
    if (offset < 0 || offset + n > b.shared_bytes) {
      b.fault(FaultKind::shared_out_of_bounds, where, 0, -1, "%s of %zu bytes at shared offset %td of %zu", write ? "write" : "read", n,
              offset, b.shared_bytes);
      return;
    }
    if (b.settings.profile)
      b.profile.record(f->warp, f->lane, b.warps[f->warp].alive, true, write, static_cast<uint64_t>(offset), static_cast<int>(n), where);
    b.touch(write ? Touch::write : Touch::read, static_cast<uint32_t>(offset), n, where);
    return;
  }
  global_access(b, p, n, write, where);
}

}  // namespace
}  // namespace emu

#define EMU_CALLER __builtin_return_address(0)
#define EMU_HOOKS_OF_SIZE(N)                                                                       \
  void __tsan_read##N(void* p) { emu::access(p, N, false, true, EMU_CALLER); }                     \
  void __tsan_write##N(void* p) { emu::access(p, N, true, true, EMU_CALLER); }                     \
  void __tsan_unaligned_read##N(void* p) { emu::access(p, N, false, false, EMU_CALLER); }          \
  void __tsan_unaligned_write##N(void* p) { emu::access(p, N, true, false, EMU_CALLER); }          \
  void __tsan_volatile_read##N(void* p) { emu::access(p, N, false, true, EMU_CALLER); }            \
  void __tsan_volatile_write##N(void* p) { emu::access(p, N, true, true, EMU_CALLER); }            \
  void __tsan_unaligned_volatile_read##N(void* p) { emu::access(p, N, false, false, EMU_CALLER); } \
  void __tsan_unaligned_volatile_write##N(void* p) { emu::access(p, N, true, false, EMU_CALLER); }

// Host code in the same source may use std::atomic and guarded statics.
#define EMU_ATOMICS_OF_SIZE(BITS, T)                                                                                \
  T __tsan_atomic##BITS##_load(const volatile T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }           \
  void __tsan_atomic##BITS##_store(volatile T* p, T v, int) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }           \
  T __tsan_atomic##BITS##_exchange(volatile T* p, T v, int) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); } \
  T __tsan_atomic##BITS##_fetch_add(volatile T* p, T v, int) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); } \
  T __tsan_atomic##BITS##_fetch_sub(volatile T* p, T v, int) { return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST); } \
  T __tsan_atomic##BITS##_fetch_or(volatile T* p, T v, int) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }   \
  T __tsan_atomic##BITS##_fetch_and(volatile T* p, T v, int) { return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); } \
  int __tsan_atomic##BITS##_compare_exchange_strong(volatile T* p, T* expected, T v, int, int) {                    \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                  \
  }                                                                                                                 \
  int __tsan_atomic##BITS##_compare_exchange_weak(volatile T* p, T* expected, T v, int, int) {                      \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                  \
  }

#pragma GCC visibility push(default)
extern "C" {
EMU_HOOKS_OF_SIZE(1)
EMU_HOOKS_OF_SIZE(2)
EMU_HOOKS_OF_SIZE(4)
EMU_HOOKS_OF_SIZE(8)
EMU_HOOKS_OF_SIZE(16)
void __tsan_read_range(void* p, unsigned long n) { emu::access(p, n, false, false, EMU_CALLER); }
void __tsan_write_range(void* p, unsigned long n) { emu::access(p, n, true, false, EMU_CALLER); }
EMU_ATOMICS_OF_SIZE(8, uint8_t)
EMU_ATOMICS_OF_SIZE(16, uint16_t)
EMU_ATOMICS_OF_SIZE(32, uint32_t)
EMU_ATOMICS_OF_SIZE(64, uint64_t)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
#pragma GCC visibility pop
