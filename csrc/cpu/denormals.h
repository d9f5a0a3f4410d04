// Whether this thread flushes denormal floats, for a scope.
#pragma once

namespace pk {

class Denormals {
 public:
#if defined(__x86_64__)
  explicit Denormals(bool keep) : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(keep ? saved_ & ~0x8040u : saved_ | 0x8040u); }
  ~Denormals() { __builtin_ia32_ldmxcsr(saved_); }
  Denormals(const Denormals&) = delete;

 private:
  unsigned saved_;
#else
  explicit Denormals(bool) {}
  ~Denormals() {}
  Denormals(const Denormals&) = delete;
#endif
};

}  // namespace pk
