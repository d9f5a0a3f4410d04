// Sixteen interleaved rows of a packed weight, read as floats in registers: the exact real values, column after column.
#pragma once
#include "simd.h"
#include "weight_layout.h"

#define PK_INLINE inline __attribute__((always_inline))

namespace pk {

constexpr int kParts = kBlockRows / kLanes;  // vectors that cover the rows of a block

template <int P>
struct Rows {
  vf v[P];  // row (part + p) * kLanes + lane of one column
};

inline vf byte_of(vi four, int i) { return to_float(vi((vu(four) >> (8 * i)) & 0xff)); }
inline vf nibble_of(vi four, int i, int high) { return to_float(vi((vu(four) >> (8 * i + 4 * high)) & 0xf)); }

// 32-bit lanes that hold two 16-bit floats: the even (low) or the odd (high) one.
inline vf bf16_even(vi pair) { return as_f(vu(pair) << 16); }
inline vf bf16_odd(vi pair) { return as_f(pair & int32_t(0xffff0000)); }

#if !PK_AVX2
inline vf f16_low(vi v) {  // the float16 in the low half of each lane, whatever lies above
#if PK_AVX512
  return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)v));
#else
  const vu sign = (vu(v) & 0x8000) << 16, rest = vu(v) & 0x7fff;
  const vf small = to_float(vi(rest)) * set1(0x1p-24f);  // zero and subnormals
  const vu normal = (rest << 13) + 0x38000000;
  const vu bits = vi(rest < 0x400) ? as_u(small) : vi(rest >= 0x7c00) ? normal + 0x38000000 : normal;
  return as_f(bits | sign);
#endif
}
#endif
inline void widen_pairs(vi pairs, vf& even, vf& odd, f16) {
#if PK_AVX2
  const __m256i halves = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                          0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  const __m256i parted = _mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)pairs, halves), 0xd8);  // all even, all odd
  even = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(parted));
  odd = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(parted, 1));
#else
  even = f16_low(pairs);
  odd = f16_low(vi(vu(pairs) >> 16));
#endif
}
inline void widen_pairs(vi pairs, vf& even, vf& odd, bf16) {
  even = bf16_even(pairs);
  odd = bf16_odd(pairs);
}

// RowBlock<F>::columns<P>(block, k, c0, n, part, use): calls use(column - c0, Rows<P>) for columns c0 .. c0 + n - 1.
// c0 is a multiple of kChunk; the order of the calls is fixed.
template <WeightFormat F>
struct RowBlock;

template <>
struct RowBlock<WeightFormat::float32> {
  static constexpr int kChunk = 64;
  template <int P, class Use>
  static PK_INLINE void columns(const uint8_t* block, int64_t, int64_t c0, int n, int part, Use&& use) {
    const float* w = reinterpret_cast<const float*>(block) + c0 * kBlockRows + part * kLanes;
#pragma GCC unroll 4
    for (int c = 0; c < n; ++c, w += kBlockRows) {
      Rows<P> r;
      for (int p = 0; p < P; ++p) r.v[p] = load(w + p * kLanes);
      use(c, r);
    }
  }
};

template <class T>
struct RowBlock16 {  // bfloat16 and float16
  static constexpr int kChunk = 64;
  template <int P, class Use>
  static PK_INLINE void columns(const uint8_t* block, int64_t k, int64_t c0, int n, int part, Use&& use) {
    const uint8_t* w = block + c0 * 2 * kBlockRows;
#pragma GCC unroll 4
    for (int c = 0; c + 1 < n; c += 2, w += 4 * kBlockRows) {
      Rows<P> even, odd;
      for (int p = 0; p < P; ++p) widen_pairs(load_bits<vi>(w + (part + p) * kLanes * 4), even.v[p], odd.v[p], T{});
      use(c, even);
      use(c + 1, odd);
    }
    if (n & 1 && c0 + n == k) {
      Rows<P> last;
      for (int p = 0; p < P; ++p) last.v[p] = load(reinterpret_cast<const T*>(w) + (part + p) * kLanes);
      use(n - 1, last);
    }
  }
};
template <>
struct RowBlock<WeightFormat::bfloat16> : RowBlock16<bf16> {};
template <>
struct RowBlock<WeightFormat::float16> : RowBlock16<f16> {};

// Codes without their scale: it multiplies the whole row once, at the end.
template <>
struct RowBlock<WeightFormat::int8> {
  static constexpr int kChunk = kGroup;
  template <int P, class Use>
  static PK_INLINE void columns(const uint8_t* block, int64_t, int64_t c0, int n, int part, Use&& use) {
    const uint8_t* codes = block + 64 + c0 * kBlockRows;
    if (n < kGroup) return tail<P>(codes, n, part, use);
#pragma GCC unroll 2
    for (int j = 0; j < 8; ++j) {
      vi four[P];
      for (int p = 0; p < P; ++p) four[p] = load_bits<vi>(codes + j * 64 + (part + p) * kLanes * 4);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        Rows<P> r;
        for (int p = 0; p < P; ++p) r.v[p] = byte_of(four[p], i) - set1(128.f);
        use(4 * j + i, r);
      }
    }
  }

 private:
  template <int P, class Use>
  static PK_INLINE void tail(const uint8_t* codes, int n, int part, Use&& use) {
    for (int c = 0; c < n; ++c) {
      Rows<P> r;
      for (int p = 0; p < P; ++p) r.v[p] = to_float(vi(widen(load_bits<vb>(codes + c * kBlockRows + (part + p) * kLanes)))) - set1(128.f);
      use(c, r);
    }
  }
};

template <>
struct RowBlock<WeightFormat::fp8_e4m3> {
  static constexpr int kChunk = kGroup;
  template <int P, class Use>
  static PK_INLINE void columns(const uint8_t* block, int64_t, int64_t c0, int n, int part, Use&& use) {
    const fp8* w = reinterpret_cast<const fp8*>(block + 64) + c0 * kBlockRows + part * kLanes;
#pragma GCC unroll 4
    for (int c = 0; c < n; ++c, w += kBlockRows) {
      Rows<P> r;
      for (int p = 0; p < P; ++p) r.v[p] = load(w + p * kLanes);
      use(c, r);
    }
  }
};

// code x d + m, exact up to the one rounding of the sum: fma(code, d, m) with m = -8 d, m, -128 d.
template <bool Minimum>
struct RowBlockQ4 {
  static constexpr int kChunk = kGroup, kHeads = Minimum ? 2 : 1, kBytes = kBlockRows * (2 * kHeads + 16);
  template <int P, class Use>
  static PK_INLINE void columns(const uint8_t* block, int64_t, int64_t c0, int, int part, Use&& use) {
    const uint8_t* w = block + c0 / kGroup * kBytes;
    vf d[P], m[P];
    for (int p = 0; p < P; ++p) {
      d[p] = load(reinterpret_cast<const f16*>(w) + (part + p) * kLanes);
      m[p] = Minimum ? load(reinterpret_cast<const f16*>(w + 32) + (part + p) * kLanes) : d[p] * set1(-8.f);
    }
    const uint8_t* codes = w + 32 * kHeads;
#pragma GCC unroll 1
    for (int j = 0; j < 4; ++j) {
      vi eight[P];
      for (int p = 0; p < P; ++p) eight[p] = load_bits<vi>(codes + j * 64 + (part + p) * kLanes * 4);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        Rows<P> r;
        for (int p = 0; p < P; ++p) r.v[p] = fma(nibble_of(eight[p], i & 3, i >> 2), d[p], m[p]);
        use(16 * (i >> 2) + 4 * j + (i & 3), r);
      }
    }
  }
};
template <>
struct RowBlock<WeightFormat::q4_0> : RowBlockQ4<false> {};
template <>
struct RowBlock<WeightFormat::q4_1> : RowBlockQ4<true> {};

template <>
struct RowBlock<WeightFormat::q8_0> {
  static constexpr int kChunk = kGroup;
  template <int P, class Use>
  static PK_INLINE void columns(const uint8_t* block, int64_t k, int64_t c0, int, int part, Use&& use) {
    const Q8Group at = q8_group(c0 / kGroup, k / kGroup);
    vf d[P], m[P];
    for (int p = 0; p < P; ++p) {
      d[p] = load(reinterpret_cast<const f16*>(block + at.scales) + (part + p) * kLanes);
      m[p] = d[p] * set1(-128.f);
    }
#pragma GCC unroll 2
    for (int j = 0; j < 8; ++j) {
      vi four[P];
      for (int p = 0; p < P; ++p) four[p] = load_bits<vi>(block + at.codes + j * 64 + (part + p) * kLanes * 4);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        Rows<P> r;
        for (int p = 0; p < P; ++p) r.v[p] = fma(byte_of(four[p], i), d[p], m[p]);
        use(4 * j + i, r);
      }
    }
  }
};

// The per-row scale of the channel formats.
template <WeightFormat F, int P>
PK_INLINE void scale_rows(const uint8_t* block, int part, vf (&sum)[P]) {
  if constexpr (is_channel_format(F))
    for (int p = 0; p < P; ++p) sum[p] *= load(reinterpret_cast<const float*>(block) + (part + p) * kLanes);
}

}  // namespace pk
