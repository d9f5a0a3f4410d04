// Products with activations in 8 bits: exact integer dot products of 32 columns, float32 sums over the groups.
//
// Group g of a token t adds  d_g x s_gt x sum(q x code)  with one fused multiply-add, and for q4_1  m_g x s_gt x sum(code)
// before it, in the order of the columns for every tile width.
#include <utility>

#include "row_block.h"
#include "tile_kernels.h"

namespace pk {
namespace {

// Scales of one group in a rows16 block, and the eight vectors of codes below 256.
template <WeightFormat F>
struct DotGroup {
  const uint8_t *scales, *minima, *codes;
  static constexpr bool kNibbles = F == WeightFormat::q4_0 || F == WeightFormat::q4_1;

  DotGroup(const uint8_t* block, int64_t group, int64_t groups) : scales(block), minima(nullptr) {
    if constexpr (kNibbles) {
      constexpr int heads = F == WeightFormat::q4_1 ? 2 : 1;
      scales = block + group * kBlockRows * (2 * heads + 16);
      minima = scales + 32;
      codes = scales + 32 * heads;
    } else if constexpr (F == WeightFormat::q8_0) {
      const Q8Group at = q8_group(group, groups);
      scales = block + at.scales;
      codes = block + at.codes;
    } else {
      codes = block + 64 + group * kGroup * kBlockRows;
    }
  }
  vf half(const uint8_t* p, int part) const { return load(reinterpret_cast<const f16*>(p) + part * kLanes); }
};

PK_INLINE vi quad(const uint8_t* p) { return set1i(load_bits<int32_t>(p)); }

// Integer sums of one group: s[p][t] for the rows of part + p and token t, unsigned codes corrected.
#if !PK_AVX2
constexpr int kDotParts = 1;

// acc + the dot product of four unsigned codes with four signed ones, per 32-bit lane.
PK_INLINE vi dot4(vi acc, vi codes, vi x) {
#if PK_AVX512 && defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)x);
#else
  // 16-bit products of even and odd bytes fit (255 x 127); they are summed in 32 bits.
  typedef int16_t vs __attribute__((vector_size(4 * kLanes)));
  const vi even = vi(vs(codes & 0x00ff00ff) * (vs(vs(x) << 8) >> 8));
  const vi odd = vi(vs((vu(codes) >> 8) & 0x00ff00ff) * (vs(x) >> 8));
  return acc + (vi(vu(even) << 16) >> 16) + (even >> 16) + (vi(vu(odd) << 16) >> 16) + (odd >> 16);
#endif
}

template <WeightFormat F, int W>
PK_INLINE void dot_group(const DotGroup<F>& group, int part, const uint8_t* x, vi (&s)[kDotParts][W]) {
  vi second[W];  // narrow tiles: a second chain hides the latency
#pragma GCC unroll 16
  for (int t = 0; t < W; ++t) {
    s[0][t] = F == WeightFormat::q4_1 ? vi{} : quad(x + 36 * W + 4 * t);
    second[t] = vi{};
  }
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    const int line = DotGroup<F>::kNibbles ? j & 3 : j;
    const vi bytes = load_bits<vi>(group.codes + 64 * line + part * kLanes * 4);
    const vi codes = !DotGroup<F>::kNibbles ? bytes : j < 4 ? bytes & 0x0f0f0f0f : vi(vu(bytes) >> 4) & 0x0f0f0f0f;
#pragma GCC unroll 16
    for (int t = 0; t < W; ++t) {
      vi& chain = W <= 2 && j & 1 ? second[t] : s[0][t];
      chain = dot4(chain, codes, quad(x + 4 * (j * W + t)));
    }
  }
  if (W <= 2)
    for (int t = 0; t < W; ++t) s[0][t] += second[t];
}
#else
// Without vpdpbusd: vpmaddubsw adds pairs of products in 16 bits. All sixteen rows at once, so that an activation is
// broadcast once. gcc would reassociate the chains into more live products than there are registers: `pin` keeps them.
constexpr int kDotParts = 2;
PK_INLINE void pin(__m256i& a, __m256i& b) { __asm__("" : "+x"(a), "+x"(b)); }

// 4-bit codes: |15 x 127 x 2 x 8| < 2^15, so one 16-bit accumulator holds a group of 32 columns.
template <WeightFormat F, int W>
PK_INLINE void dot_nibbles(const DotGroup<F>& group, const uint8_t* x, vi (&s)[kDotParts][W]) {
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i a[W], b[W];
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    const uint8_t* line = group.codes + 64 * (j / 2);  // its low nibbles are quad j / 2, its high ones quad 4 + j / 2
    const __m256i first = load_bits<__m256i>(line), second = load_bits<__m256i>(line + 32);
    const __m256i p = _mm256_and_si256(j & 1 ? _mm256_srli_epi16(first, 4) : first, low);
    const __m256i q = _mm256_and_si256(j & 1 ? _mm256_srli_epi16(second, 4) : second, low);
#pragma GCC unroll 8
    for (int t = 0; t < W; ++t) {
      const __m256i xt = (__m256i)quad(x + 4 * ((4 * (j & 1) + j / 2) * W + t));
      const __m256i u = _mm256_maddubs_epi16(p, xt), v = _mm256_maddubs_epi16(q, xt);
      a[t] = j ? _mm256_add_epi16(a[t], u) : u;
      b[t] = j ? _mm256_add_epi16(b[t], v) : v;
      pin(a[t], b[t]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < W; ++t) {
    const vi correction = F == WeightFormat::q4_1 ? vi{} : quad(x + 36 * W + 4 * t);
    s[0][t] = (vi)_mm256_madd_epi16(a[t], ones) + correction;
    s[1][t] = (vi)_mm256_madd_epi16(b[t], ones) + correction;
  }
}

// 8-bit codes: |w| <= 128 unsigned times sign(x, w), pairs at most 128 x 127 x 2 < 2^15, exact for w = -128 too.
template <WeightFormat F, int W>
PK_INLINE void dot_bytes(const DotGroup<F>& group, const uint8_t* x, vi (&s)[kDotParts][W]) {
  const __m256i flip = _mm256_set1_epi8(char(0x80)), ones = _mm256_set1_epi16(1);
  __m256i a[W], b[W];
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    const __m256i p = _mm256_xor_si256(load_bits<__m256i>(group.codes + 64 * j), flip), p_size = _mm256_abs_epi8(p);
    const __m256i q = _mm256_xor_si256(load_bits<__m256i>(group.codes + 64 * j + 32), flip), q_size = _mm256_abs_epi8(q);
#pragma GCC unroll 8
    for (int t = 0; t < W; ++t) {
      const __m256i xt = (__m256i)quad(x + 4 * (j * W + t));
      const __m256i u = _mm256_madd_epi16(_mm256_maddubs_epi16(p_size, _mm256_sign_epi8(xt, p)), ones);
      const __m256i v = _mm256_madd_epi16(_mm256_maddubs_epi16(q_size, _mm256_sign_epi8(xt, q)), ones);
      a[t] = j ? _mm256_add_epi32(a[t], u) : u;
      b[t] = j ? _mm256_add_epi32(b[t], v) : v;
      pin(a[t], b[t]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < W; ++t) s[0][t] = (vi)a[t], s[1][t] = (vi)b[t];
}

template <WeightFormat F, int W>
PK_INLINE void dot_group(const DotGroup<F>& group, int, const uint8_t* x, vi (&s)[kDotParts][W]) {
  if constexpr (DotGroup<F>::kNibbles)
    dot_nibbles<F, W>(group, x, s);
  else
    dot_bytes<F, W>(group, x, s);
}
#endif

// acc[p][t] += what the group with integer sums s[p][t] contributes.
template <WeightFormat F, int W>
PK_INLINE void add_group(const DotGroup<F>& g, int part, const uint8_t* x, const vi (&s)[kDotParts][W], vf (&acc)[kDotParts][W]) {
  const float* scale = reinterpret_cast<const float*>(x + 32 * W);
  vf d[kDotParts], m[kDotParts];
  for (int p = 0; p < kDotParts; ++p) {
    d[p] = F == WeightFormat::int8 ? set1(1.f) : g.half(g.scales, part + p);
    m[p] = F == WeightFormat::q4_1 ? g.half(g.minima, part + p) : d[p];
  }
#pragma GCC unroll 16
  for (int t = 0; t < W; ++t) {
    const vf token = set1(scale[t]);
#pragma GCC unroll 2
    for (int p = 0; p < kDotParts; ++p) {
      if constexpr (F == WeightFormat::q4_1) acc[p][t] = fma(m[p], set1(scale[W + t]), acc[p][t]);
      acc[p][t] = fma(to_float(s[p][t]), F == WeightFormat::int8 ? token : d[p] * token, acc[p][t]);
    }
  }
}

// Narrow tiles wait for weights, and the hardware prefetcher stops at every page: a quarter of the bandwidth.
constexpr int kPrefetchBytes = 8192, kPrefetchWidth = 4;
template <WeightFormat F>
inline void prefetch_group(const uint8_t* codes) {
  constexpr int bytes = F == WeightFormat::q4_0 ? 288 : F == WeightFormat::q4_1 ? 320 : 544;
#pragma GCC unroll 9
  for (int at = 0; at < bytes; at += 64) __builtin_prefetch(codes + kPrefetchBytes + at);
}

template <WeightFormat F, int W>
void dot_tile(const uint8_t* block, int64_t k, const uint8_t* tile, float* out) {
  const int64_t groups = k / kGroup;
  for (int part = 0; part < kParts; part += kDotParts) {
    vf acc[kDotParts][W] = {};
    const uint8_t* x = tile;
    for (int64_t g = 0; g < groups; ++g, x += kGroupBytes * W) {
      const DotGroup<F> group(block, g, groups);
      if constexpr (W <= kPrefetchWidth) prefetch_group<F>(group.codes);
      vi s[kDotParts][W];
      dot_group<F, W>(group, part, x, s);
      add_group<F, W>(group, part, x, s, acc);
    }
    for (int t = 0; t < W; ++t)
      for (int p = 0; p < kDotParts; ++p) {
        vf sum[1] = {acc[p][t]};
        scale_rows<F, 1>(block, part + p, sum);
        store(out + t * kBlockRows + (part + p) * kLanes, sum[0]);
      }
  }
}

template <WeightFormat F, int... I>
constexpr TileKernels dot_widths(std::integer_sequence<int, I...>) {
  return {dot_tile<F, I + 1>...};
}
template <WeightFormat F>
constexpr TileKernels kDots = dot_widths<F>(std::make_integer_sequence<int, kDotWidth>{});

}  // namespace

const TileKernels* dot_kernels(WeightFormat format) {
  switch (format) {
    case WeightFormat::int8:
      return &kDots<WeightFormat::int8>;
    case WeightFormat::q4_0:
      return &kDots<WeightFormat::q4_0>;
    case WeightFormat::q4_1:
      return &kDots<WeightFormat::q4_1>;
    case WeightFormat::q8_0:
      return &kDots<WeightFormat::q8_0>;
    default:
      return nullptr;
  }
}

}  // namespace pk
