// Activations to codes: groups of 32 columns, scale = amax / limit, code = rint(x * (limit / amax)), float32 throughout; limit is
// 127 for 8 bits and 127 x 254 for 16, where a code is then split into two of 8 bits, high x 254 + low.
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
  for (int i = 0; i < kGroup / kLanes; ++i) store_bits(quads + i * kLanes / 4, low_bytes(vu(v[i])));
#endif
}

// Codes of one group and their scale, before they are packed.
struct GroupCodes {
  static constexpr int N = kGroup / kLanes;
  vi code[N];
  float scale;
};

template <class T>
inline GroupCodes group_codes(const T* x, float limit) {
  constexpr int N = GroupCodes::N;
  vf v[N];
  vi peak = vi{};  // magnitudes compare like integers, and infinities and NaN are above all numbers
  for (int i = 0; i < N; ++i) {
    v[i] = load(x + i * kLanes);
    const vi size = as_i(v[i]) & 0x7fffffff;
    peak = select(size > peak, size, peak);
  }
  const float amax = bits_to_float(uint32_t(reduce_max(peak)));
  const bool finite = amax < kInf;  // else the scale is NaN, so that every output of this token shows it
  const float inverse = finite && amax > 0.f ? limit / amax : 0.f;
  GroupCodes out;
  out.scale = finite ? amax / limit : kNan;
  for (int i = 0; i < N; ++i) out.code[i] = round_to_int(finite ? v[i] * set1(inverse) : set1(0.f));
  return out;
}

inline QuantisedGroup pack_group(const vi (&code)[GroupCodes::N], float scale) {
  QuantisedGroup out;
  vi sum = vi{};
  for (const vi& c : code) sum += c;
  pack_codes(code, out.quads);
  out.scale = scale;
  out.sum = reduce_add(sum);
  return out;
}

template <class T>
inline QuantisedGroup quantise_group(const T* x) {
  const GroupCodes g = group_codes(x, 127.f);
  return pack_group(g.code, g.scale);
}

// Sixteen bits: two groups whose products are added.
struct SplitGroup {
  QuantisedGroup high, low;
};
template <class T>
inline SplitGroup quantise_group_16(const T* x) {
  constexpr int kSplit = 254;
  const GroupCodes g = group_codes(x, 127.f * kSplit);
  vi high[GroupCodes::N], low[GroupCodes::N];
  for (int i = 0; i < GroupCodes::N; ++i) {
    high[i] = round_to_int(to_float(g.code[i]) * set1(1.f / kSplit));
    low[i] = g.code[i] - high[i] * kSplit;
  }
  return {pack_group(high, g.scale * kSplit), pack_group(low, g.scale)};
}

}  // namespace pk
