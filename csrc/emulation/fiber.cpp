#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#if !defined(__x86_64__) && !defined(EMU_PORTABLE_FIBERS)
#define EMU_PORTABLE_FIBERS
#endif
#ifdef EMU_PORTABLE_FIBERS
#include <ucontext.h>
#endif

namespace emu {

Stack::Stack(size_t bytes) : bytes_(bytes) {
  const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* base = mmap(nullptr, bytes + guard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED || mprotect(base, guard, PROT_NONE) != 0) {
    std::perror("emulation: fiber stack");
    std::abort();
  }
  low_ = static_cast<unsigned char*>(base) + guard;
}

Stack::~Stack() {
  const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  munmap(low_ - guard, bytes_ + guard);
}

#ifdef EMU_PORTABLE_FIBERS

// swapcontext saves the signal mask by a system call on every switch: right everywhere, several times slower.
static ucontext_t& state(void*& p) {
  if (!p) p = new ucontext_t;
  return *static_cast<ucontext_t*>(p);
}

Context::~Context() { delete static_cast<ucontext_t*>(state_); }

void prepare(Context& context, const Stack& stack, void (*entry)()) {
  ucontext_t& u = state(context.state_);
  getcontext(&u);
  u.uc_stack.ss_sp = stack.low();
  u.uc_stack.ss_size = static_cast<size_t>(stack.high() - stack.low());
  u.uc_link = nullptr;
  makecontext(&u, entry, 0);
}

void switch_context(Context& from, Context& to) { swapcontext(&state(from.state_), &state(to.state_)); }

#else

// Saves the callee-saved registers of the System V ABI on the old stack, takes those of the new one.
extern "C" void emu_switch_stack(void** save, void* to);
asm(R"(
.text
.globl emu_switch_stack
.hidden emu_switch_stack
.type emu_switch_stack,@function
emu_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch_stack, .-emu_switch_stack
)");

Context::~Context() = default;

void prepare(Context& context, const Stack& stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack.high());
  *--top = nullptr;  // entry's return address: keeps the ABI's stack alignment
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; i++) *--top = nullptr;  // rbp, rbx, r12-r15
  context.state_ = top;
}

void switch_context(Context& from, Context& to) { emu_switch_stack(&from.state_, to.state_); }

#endif

}  // namespace emu
