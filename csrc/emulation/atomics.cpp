// Atomics on global and shared memory. Other workers' blocks may update the same word, hence the compare-and-swap.
#include "block.h"
#include "memory.h"

namespace emu {

void memory_fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

static bool check(void* p, size_t n, Site where) {
  Block& b = *block();
  const auto* c = static_cast<const unsigned char*>(p);
  if (reinterpret_cast<uintptr_t>(p) % n != 0) {
    b.fault(FaultKind::misaligned, where, 0, -1, "an atomic of %zu bytes at an address that is not a multiple of %zu", n, n);
    return false;
  }
  if (c >= b.shared && c < b.shared + b.shared_bytes) {
    b.touch(Touch::atomic, static_cast<uint32_t>(c - b.shared), n, where);
    return true;
  }
  if (c >= b.static_shared && c < b.static_shared + b.static_bytes) {
    b.touch_static(Touch::atomic, static_cast<size_t>(c - b.static_shared), n, where);
    return true;
  }
  const Range* range = find_range(p, n);
  if (!range) {
    b.fault(FaultKind::global_out_of_bounds, where, 0, -1, "an atomic of %zu bytes: %s", n, describe_address(p, n).c_str());
  } else if (!range->writable) {
    b.fault(FaultKind::read_only_write, where, 0, -1, "an atomic on the input `%s`", range->label.c_str());
  }
  return range != nullptr;
}

template <class T>
static T update_word(T* p, T (*update)(T, const void*), const void* operand) {
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(p, &old, update(old, operand), false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {}
  return old;
}

uint32_t atomic_u32(void* p, uint32_t (*update)(uint32_t, const void*), const void* operand, Site where) {
  return check(p, 4, where) ? update_word(static_cast<uint32_t*>(p), update, operand) : 0;
}

uint64_t atomic_u64(void* p, uint64_t (*update)(uint64_t, const void*), const void* operand, Site where) {
  return check(p, 8, where) ? update_word(static_cast<uint64_t*>(p), update, operand) : 0;
}

}  // namespace emu
