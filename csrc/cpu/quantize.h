// Activations to 8 bits: groups of 32 columns, scale = amax / 127, code = rint(x * (127 / amax)), float32 throughout.
#pragma once
#include "simd.h"
#include "weight_layout.h"

namespace pk {

// One group: codes in four bytes per word, the scale, and the sum of the codes.
struct QuantisedGroup {
  uint32_t quads[kGroup / 4];
  float scale;
  int32_t sum;
};

// The nearest integers, ties to even.
inline vi round_to_int(vf x) {
#if PK_AVX512
  return (vi)_mm512_cvtps_epi32((__m512)x);
#elif PK_AVX2
  return (vi)_mm256_cvtps_epi32((__m256)x);
#else
  return to_int(round_even(x));
#endif
}

// 32 codes in [-127, 127] to bytes.
inline void pack_codes(const vi (&v)[kGroup / kLanes], uint32_t* quads) {
#if PK_AVX2
  const __m256i a = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]), b = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]);
  // both packs work inside 128-bit halves: put the quads back in order
  store_bits(quads, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
#else
  typedef int8_t codes __attribute__((vector_size(kLanes)));
  for (int i = 0; i < kGroup / kLanes; ++i) store_bits(reinterpret_cast<int8_t*>(quads) + i * kLanes, __builtin_convertvector(v[i], codes));
#endif
}

template <class T>
inline QuantisedGroup quantise_group(const T* x) {
  constexpr int N = kGroup / kLanes;
  vf v[N];
  vi peak = vi{};  // magnitudes compare like integers, and infinities and NaN are above all numbers
  for (int i = 0; i < N; ++i) {
    v[i] = load(x + i * kLanes);
    const vi size = as_i(v[i]) & 0x7fffffff;
    peak = select(size > peak, size, peak);
  }
  const float amax = bits_to_float(uint32_t(reduce_max(peak)));
  const bool finite = amax < kInf;  // else the scale is NaN, so that every output of this token shows it
  const float inverse = finite && amax > 0.f ? 127.f / amax : 0.f;
  QuantisedGroup out;
  out.scale = finite ? amax / 127.f : kNan;
  vi code[N], sum = vi{};
  for (int i = 0; i < N; ++i) {
    code[i] = round_to_int(finite ? v[i] * set1(inverse) : set1(0.f));
    sum += code[i];
  }
  pack_codes(code, out.quads);
  out.sum = reduce_add(sum);
  return out;
}

}  // namespace pk
