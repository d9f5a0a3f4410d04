// Fibers: stacks with a guard page, and the switch between them.
#pragma once
#include <cstddef>

#if !defined(__x86_64__) && !defined(EMU_PORTABLE_FIBERS)
#define EMU_PORTABLE_FIBERS
#endif
#ifdef EMU_PORTABLE_FIBERS
#include <ucontext.h>
#endif

namespace emu {

// Where a suspended fiber (or the scheduler) continues.
struct Context {
#ifdef EMU_PORTABLE_FIBERS
  ucontext_t state;
#else
  void* stack_pointer = nullptr;
#endif
};

class Stack {
 public:
  explicit Stack(size_t bytes);
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  unsigned char* low() const { return low_; }
  unsigned char* high() const { return low_ + bytes_; }
  bool contains(const void* p) const { return p >= low_ && p < low_ + bytes_; }

 private:
  unsigned char* low_;  // above the guard page: an overflow faults at once instead of corrupting a neighbour
  size_t bytes_;
};

// Makes `context` start at `entry` (which must never return) on `stack`.
void prepare(Context& context, const Stack& stack, void (*entry)());
void switch_context(Context& from, Context& to);

}  // namespace emu
