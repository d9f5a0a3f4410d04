// Fibers: stacks with a guard page, and the switch between them.
#pragma once
#include <cstddef>

namespace emu {

// Where a suspended fiber (or the scheduler) continues: its stack pointer, or on the portable path a ucontext.
class Context {
 public:
  Context() = default;
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

 private:
  friend void prepare(Context&, const class Stack&, void (*)());
  friend void switch_context(Context&, Context&);
  void* state_ = nullptr;
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
