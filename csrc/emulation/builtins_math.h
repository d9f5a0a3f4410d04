// Arithmetic intrinsics that exist on the device only. Included by builtins.h.
#pragma once

// -- bits ----------------------------------------------------------------------------------------------------------
inline float __uint_as_float(unsigned u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline unsigned __float_as_uint(float f) {
  unsigned u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline float __int_as_float(int i) { return __uint_as_float(static_cast<unsigned>(i)); }
inline int __float_as_int(float f) { return static_cast<int>(__float_as_uint(f)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline unsigned __brev(unsigned x) {
  unsigned out = 0;
  for (int i = 0; i < 32; i++) out |= (x >> i & 1u) << (31 - i);
  return out;
}
// Bytes of {y, x} picked by the four selectors of s; a selector's top bit replicates the byte's sign.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned selector = s >> (4 * i) & 0xf;
    auto byte = static_cast<unsigned>(bytes >> (8 * (selector & 7)) & 0xff);
    if (selector & 8) byte = byte & 0x80 ? 0xff : 0;
    out |= byte << (8 * i);
  }
  return out;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
  return c;
}

// -- arithmetic ----------------------------------------------------------------------------------------------------
// Overloads for every type: one for int alone would quietly convert floats.
#define EMU_MIN_MAX(T)                             \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
inline float min(float a, float b) { return ::fminf(a, b); }
inline float max(float a, float b) { return ::fmaxf(a, b); }
inline double min(double a, double b) { return ::fmin(a, b); }
inline double max(double a, double b) { return ::fmax(a, b); }
#undef EMU_MIN_MAX

inline float sinpif(float a) { return static_cast<float>(::sin(3.14159265358979323846 * a)); }
inline float cospif(float a) { return static_cast<float>(::cos(3.14159265358979323846 * a)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return ::fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fsqrt_rn(float a) { return ::sqrtf(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float a) { return a > 0.f ? (a < 1.f ? a : 1.f) : 0.f; }  // NaN gives 0, as on the device
inline float rsqrtf(float a) { return 1.f / ::sqrtf(a); }
inline float __frsqrt_rn(float a) { return static_cast<float>(1.0 / ::sqrt(static_cast<double>(a))); }
// glibc declares these names without defining them; the asm label keeps ours apart.
#define EMU_FAST(name, value) \
  static inline float emu_##name(float x) { return value; }
EMU_FAST(expf, ::expf(x))
EMU_FAST(exp10f, ::powf(10.f, x))
EMU_FAST(logf, ::logf(x))
EMU_FAST(log2f, ::log2f(x))
EMU_FAST(log10f, ::log10f(x))
EMU_FAST(sinf, ::sinf(x))
EMU_FAST(cosf, ::cosf(x))
#undef EMU_FAST
#define __expf(x) emu_expf(x)
#define __exp10f(x) emu_exp10f(x)
#define __logf(x) emu_logf(x)
#define __log2f(x) emu_log2f(x)
#define __log10f(x) emu_log10f(x)
#define __sinf(x) emu_sinf(x)
#define __cosf(x) emu_cosf(x)
#define __powf(x, y) ::powf(x, y)

// -- conversions ---------------------------------------------------------------------------------------------------
// Float to integer saturates on the device and is undefined in C++: clamp, NaN to 0.
namespace emu {
template <class I>
inline I to_integer(double rounded) {
  if (rounded != rounded) return 0;
  constexpr double low = static_cast<double>(std::numeric_limits<I>::min()), high = static_cast<double>(std::numeric_limits<I>::max());
  return rounded <= low ? std::numeric_limits<I>::min() : rounded >= high ? std::numeric_limits<I>::max() : static_cast<I>(rounded);
}
}  // namespace emu
inline int __float2int_rn(float f) { return emu::to_integer<int>(::rint(static_cast<double>(f))); }
inline int __float2int_rz(float f) { return emu::to_integer<int>(::trunc(static_cast<double>(f))); }
inline int __float2int_rd(float f) { return emu::to_integer<int>(::floor(static_cast<double>(f))); }
inline int __float2int_ru(float f) { return emu::to_integer<int>(::ceil(static_cast<double>(f))); }
inline unsigned __float2uint_rn(float f) { return emu::to_integer<unsigned>(::rint(static_cast<double>(f))); }
inline unsigned __float2uint_rz(float f) { return emu::to_integer<unsigned>(::trunc(static_cast<double>(f))); }
inline float __int2float_rn(int i) { return static_cast<float>(i); }
inline float __uint2float_rn(unsigned i) { return static_cast<float>(i); }

// -- half precision ------------------------------------------------------------------------------------------------
namespace emu {
// a * b + c for 16-bit floats, so that rounding the result once more gives the fused result: the product is exact in double,
// and an inexact sum is rounded to odd, which no later rounding can mistake for a tie.
inline double fused_to_odd(float a, float b, float c) {
  const double product = static_cast<double>(a) * b, sum = product + c;
  const double part = sum - product, error = (product - (sum - part)) + (c - part);
  uint64_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  if (!(error == error) || error == 0.0 || (bits & 1)) return sum;
  bits += (error > 0) == (sum > 0) ? 1 : -1;
  double odd;
  std::memcpy(&odd, &bits, sizeof odd);
  return odd;
}
}  // namespace emu
inline __half __hfma(__half a, __half b, __half c) {
  return __double2half(emu::fused_to_odd(__half2float(a), __half2float(b), __half2float(c)));
}
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  return __double2bfloat16(emu::fused_to_odd(__bfloat162float(a), __bfloat162float(b), __bfloat162float(c)));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __half2(__hfma(__low2half(a), __low2half(b), __low2half(c)), __hfma(__high2half(a), __high2half(b), __high2half(c)));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return __nv_bfloat162(__hfma(__low2bfloat16(a), __low2bfloat16(b), __low2bfloat16(c)),
                        __hfma(__high2bfloat16(a), __high2bfloat16(b), __high2bfloat16(c)));
}
