#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

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
void prepare(Context& context, const Stack& stack, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack.low();
  context.state.uc_stack.ss_size = static_cast<size_t>(stack.high() - stack.low());
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

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

void prepare(Context& context, const Stack& stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack.high());
  *--top = nullptr;  // entry's return address: keeps the ABI's stack alignment
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; i++) *--top = nullptr;  // rbp, rbx, r12-r15
  context.stack_pointer = top;
}

void switch_context(Context& from, Context& to) { emu_switch_stack(&from.stack_pointer, to.stack_pointer); }

#endif

}  // namespace emu
