// Vectors of floats and 32-bit integers, as wide as the ISA level that this file is compiled for.
//
// GCC vector extensions give one source for every level: AVX-512 (16 lanes), AVX2 (8), and a baseline (4) that the
// compiler lowers to SSE2, NEON or scalar code. What they cannot say (fused multiply-add, float16 conversion) has one
// intrinsic per level and a portable form beside it. PK_EMULATE_512 compiles the 16-lane code with the portable forms,
// so that machines without AVX-512 test its logic.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../common/dtype.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PK_AVX512 1
#else
#define PK_AVX512 0
#endif
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !PK_AVX512 && !defined(PK_EMULATE_512)
#define PK_AVX2 1
#else
#define PK_AVX2 0
#endif

namespace pk {

#if PK_AVX512 || defined(PK_EMULATE_512)
constexpr int kLanes = 16;
#elif PK_AVX2
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// ---- plain moves ----------------------------------------------------------------------------------------------
template <class V, class T>
inline V load_bits(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class T>
inline void store_bits(T* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

inline vf set1(float x) { return x - vf{}; }  // not vf{} + x: adding to zero is an instruction, since it turns -0 into 0
inline vi set1i(int32_t x) { return vi{} + x; }
inline vf as_f(vi v) { return (vf)v; }
inline vf as_f(vu v) { return (vf)v; }
inline vi as_i(vf v) { return (vi)v; }
inline vu as_u(vf v) { return (vu)v; }
inline vi iota() {
  vi v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}
inline vf to_float(vi v) { return __builtin_convertvector(v, vf); }
inline vi select(vi mask, vi a, vi b) { return mask ? a : b; }
inline vf select(vi mask, vf a, vf b) { return mask ? a : b; }

// ---- arithmetic -------------------------------------------------------------------------------------------------
inline vf fma(vf a, vf b, vf c) {
#if PK_AVX512
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif PK_AVX2
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
// The second operand wins when either is NaN, as in the x86 instructions.
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }
inline vf abs(vf a) { return as_f(as_i(a) & 0x7fffffff); }

// Round to nearest, ties to even; |x| < 2^22.
inline vf round_even(vf x) {
#if PK_AVX512
  return (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif PK_AVX2
  return (vf)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  vf magic = as_f((as_i(x) & int32_t(0x80000000)) | as_i(set1(8388608.f)));
  asm("" : "+m"(magic));  // keeps the compiler from cancelling the two additions
  vf sum = x + magic;
  asm("" : "+m"(sum));
  return sum - magic;
#endif
}
inline vi to_int(vf x) {  // of a value that is already an integer
  return __builtin_convertvector(x, vi);
}

// Folds the upper half of the lanes onto the lower one until one is left: a fixed tree, so that a level always gives the
// same bits.
template <class V, class Fold>
inline auto reduce(V v, Fold fold) {
#pragma GCC unroll 4
  for (int w = kLanes / 2; w > 0; w /= 2) v = fold(v, __builtin_shuffle(v, (iota() + w) & (kLanes - 1)));
  return v[0];
}
inline float reduce_add(vf v) {
  return reduce(v, [](vf a, vf b) { return a + b; });
}
inline int32_t reduce_add(vi v) {
  return reduce(v, [](vi a, vi b) { return a + b; });
}
inline float reduce_max(vf v) {
  return reduce(v, [](vf a, vf b) { return b > a ? b : a; });
}
inline int32_t reduce_max(vi v) {
  return reduce(v, [](vi a, vi b) { return b > a ? b : a; });
}

// ---- scalar conversions -----------------------------------------------------------------------------------------
inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
inline float to_float(f16 x) {
#if PK_AVX512 || PK_AVX2
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // inf, NaN
  if (rest < 0x400) {                                                                  // zero, subnormal
    const float v = float(rest) * 0x1p-24f;
    return sign ? -v : v;
  }
  return bits_to_float(sign | ((rest << 13) + 0x38000000));
#endif
}
inline float to_float(int8_t x) { return x; }
inline float to_float(fp8 x) {
  const uint32_t rest = x.bits & 0x7f, sign = uint32_t(x.bits & 0x80) << 24;
  if (rest == 0x7f) return bits_to_float(sign | 0x7fc00000);
  if (rest < 8) return (sign ? -1.f : 1.f) * float(rest) * 0x1p-9f;  // subnormal
  return bits_to_float(sign | ((rest << 20) + 0x3c000000));
}
inline bf16 to_bf16(float x) {
  const uint32_t u = float_to_bits(x);
  if ((u & 0x7fffffff) > 0x7f800000) return {uint16_t(u >> 16 | 0x40)};  // NaN stays NaN
  return {uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline f16 to_f16(float x) {
#if PK_AVX512 || PK_AVX2
  return {uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
  const uint32_t u = float_to_bits(x), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
  if (rest > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (rest >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // rounds to infinity
  if (rest < 0x38800000) {                                   // subnormal result: let the float adder round
    const uint32_t v = float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000;
    return {uint16_t(sign | v)};
  }
  return {uint16_t(sign | ((rest + 0xc8000fff + (rest >> 13 & 1)) >> 13))};
#endif
}
template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
  return to_bf16(x);
}
template <>
inline f16 from_float<f16>(float x) {
  return to_f16(x);
}

// ---- vector loads and stores that convert -----------------------------------------------------------------------
typedef uint16_t vh __attribute__((vector_size(2 * kLanes)));
typedef uint16_t vh_pair __attribute__((vector_size(4 * kLanes)));
typedef uint8_t vb __attribute__((vector_size(kLanes)));
typedef int8_t vb_signed __attribute__((vector_size(kLanes)));

// One instruction each; gcc makes several of a __builtin_convertvector between widths.
inline vu widen(vh v) {
#if PK_AVX512
  return (vu)_mm512_cvtepu16_epi32((__m256i)v);
#elif PK_AVX2
  return (vu)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, vu);
#endif
}
inline vu widen(vb v) {
#if PK_AVX512
  return (vu)_mm512_cvtepu8_epi32((__m128i)v);
#elif PK_AVX2
  return (vu)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(v)));
#else
  return __builtin_convertvector(v, vu);
#endif
}
inline vi widen(vb_signed v) {
#if PK_AVX512
  return (vi)_mm512_cvtepi8_epi32((__m128i)v);
#elif PK_AVX2
  return (vi)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(int64_t(v)));
#else
  return __builtin_convertvector(v, vi);
#endif
}
inline vh low_halves(vu v) {
#if PK_AVX512
  return (vh)_mm512_cvtepi32_epi16((__m512i)v);
#else
  return __builtin_convertvector(v, vh);
#endif
}
inline vb low_bytes(vu v) {
#if PK_AVX512
  return (vb)_mm512_cvtepi32_epi8((__m512i)v);
#else
  return __builtin_convertvector(v, vb);
#endif
}

inline vf load(const float* p) { return load_bits<vf>(p); }
inline vf load(const bf16* p) { return as_f(widen(load_bits<vh>(p)) << 16); }
inline vf load(const f16* p) {
#if PK_AVX512
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif PK_AVX2
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vf v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}
inline vf load(const int8_t* p) { return to_float(widen(load_bits<vb_signed>(p))); }
// Codes in 32-bit lanes.
inline vf fp8_to_float(vu code) {
  const vu rest = code & 0x7f;
  const vf small = to_float(vi(rest)) * set1(0x1p-9f);
  const vu bits = vi(rest < 8) ? as_u(small) : (rest << 20) + 0x3c000000;
  return as_f((vi(rest == 0x7f) ? vu{} + 0x7fc00000 : bits) | (code & 0x80) << 24);
}
inline vf load(const fp8* p) {
#if PK_AVX512
  // The bits of e4m3, shifted, are a float16 2^8 times too small, subnormals included; all ones stay NaN.
  const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x7f)), 7);
  const __m256i nan = _mm256_cmpeq_epi16(rest, _mm256_set1_epi16(0x3f80));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x80)), 8);
  return (vf)_mm512_cvtph_ps(_mm256_or_si256(_mm256_or_si256(rest, nan), sign)) * set1(256.f);
#elif PK_AVX2
  const __m128i code = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
  const __m128i rest = _mm_slli_epi16(_mm_and_si128(code, _mm_set1_epi16(0x7f)), 7);
  const __m128i nan = _mm_cmpeq_epi16(rest, _mm_set1_epi16(0x3f80));
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(code, _mm_set1_epi16(0x80)), 8);
  return (vf)_mm256_cvtph_ps(_mm_or_si128(_mm_or_si128(rest, nan), sign)) * set1(256.f);
#else
  return fp8_to_float(widen(load_bits<vb>(p)));
#endif
}

inline void store(float* p, vf v) { store_bits(p, v); }
inline vh bf16_bits(vf v) {
  const vu u = as_u(v), rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  const vi nan = v != v;
  return low_halves(nan ? (u >> 16 | 0x40) : rounded);
}
inline void store(bf16* p, vf v) { store_bits(p, bf16_bits(v)); }
// The same in one instruction where there is one, which takes subnormals for 0.
inline void store_normal(bf16* p, vf v) {
#if PK_AVX512
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  store(p, v);
#endif
}
inline void store(f16* p, vf v) {
#if PK_AVX512
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif PK_AVX2
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = to_f16(v[i]);
#endif
}

// The first n lanes; the others are `fill`. Nothing past p[n - 1] is touched.
template <class T>
inline vf load_n(const T* p, int n, float fill = 0.f) {
  if (n >= kLanes) return load(p);
  vf v = set1(fill);
  for (int i = 0; i < n; ++i) v[i] = to_float(p[i]);
  return v;
}
template <class T>
inline void store_n(T* p, vf v, int n) {
  if (n >= kLanes) return store(p, v);
  T tmp[kLanes];
  store(tmp, v);
  std::memcpy(p, tmp, n * sizeof(T));
}

// ---- functions --------------------------------------------------------------------------------------------------
// 2^n for integer-valued n in [-126, 127].
inline vf exp2_int(vf n) { return as_f((to_int(n) + 127) << 23); }

// e^x within about one unit in the last place; 0 below -87.3 (so for -inf), inf above 88.7, NaN for NaN.
inline vf exp(vf x) {
  const vf clamped = min(max(x, set1(-87.33655f)), set1(88.3762626647949f));
  const vf n = round_even(clamped * set1(1.44269504089f));
  vf r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p * r, r, r) + set1(1.f);
  vf y = p * exp2_int(n);
  y = select(x < set1(-87.33655f), set1(0.f), y);
  y = select(x > set1(88.3762626647949f), set1(kInf), y);
  return select(x != x, x, y);
}

// Natural logarithm of a positive normal number, within about one unit in the last place.
inline vf log(vf x) {
  const vi bits = as_i(x);
  vi e = ((bits >> 23) & 0xff) - 126;
  vf m = as_f((bits & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  const vi low = m < set1(0.707106781186547524f);
  e = e + low;  // a true comparison is -1
  m = select(low, m + m, m) - set1(1.f);
  const vf z = m * m, ef = to_float(e);
  vf y = set1(7.0376836292e-2f);
  y = fma(y, m, set1(-1.1514610310e-1f));
  y = fma(y, m, set1(1.1676998740e-1f));
  y = fma(y, m, set1(-1.2420140846e-1f));
  y = fma(y, m, set1(1.4249322787e-1f));
  y = fma(y, m, set1(-1.6668057665e-1f));
  y = fma(y, m, set1(2.0000714765e-1f));
  y = fma(y, m, set1(-2.4999993993e-1f));
  y = fma(y, m, set1(3.3333331174e-1f));
  y = y * m * z;
  y = fma(ef, set1(-2.12194440e-4f), y);
  y = fma(set1(-0.5f), z, y);
  return fma(ef, set1(0.693359375f), m + y);
}

inline vf tanh(vf x) {
  const vf a = abs(x), z = x * x;
  vf p = set1(-5.70498872745e-3f);
  p = fma(p, z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  const vf small = fma(p * z, x, x);
  const vf t = set1(1.f) - set1(2.f) / (exp(a + a) + set1(1.f));
  const vf large = as_f(as_i(t) | (as_i(x) & int32_t(0x80000000)));
  return select(a < set1(0.625f), small, select(x != x, x, large));
}

}  // namespace pk
