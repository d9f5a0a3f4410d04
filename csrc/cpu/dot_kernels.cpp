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

// acc[t] += what the group with integer sums s[t] contributes.
template <WeightFormat F, int W>
PK_INLINE void add_group(const DotGroup<F>& g, int part, const uint8_t* x, const vi (&s)[W], vf (&acc)[W]) {
  const float* scale = reinterpret_cast<const float*>(x + 32 * W);
  const vf d = F == WeightFormat::int8 ? set1(1.f) : g.half(g.scales, part);
  const vf m = F == WeightFormat::q4_1 ? g.half(g.minima, part) : d;
#pragma GCC unroll 16
  for (int t = 0; t < W; ++t) {
    if constexpr (F == WeightFormat::q4_1) acc[t] = fma(m, set1(scale[W + t]), acc[t]);
    const vf factor = F == WeightFormat::int8 ? set1(scale[t]) : d * set1(scale[t]);
    acc[t] = fma(to_float(s[t]), factor, acc[t]);
  }
}

PK_INLINE vi quad(const uint8_t* p) { return set1i(load_bits<int32_t>(p)); }

#if PK_AVX2
PK_INLINE vf set1b(const float* p) { return (vf)_mm256_broadcast_ss(p); }
#else
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
void dot_tile(const uint8_t* block, int64_t k, const uint8_t* tile, float* out) {
  const int64_t groups = k / kGroup;
  for (int part = 0; part < kParts; ++part) {
    vf acc[W] = {};
    const uint8_t* x = tile;
    for (int64_t g = 0; g < groups; ++g, x += kGroupBytes * W) {
      const DotGroup<F> group(block, g, groups);
      vi s[W], second[W];  // narrow tiles: a second chain hides the latency
#pragma GCC unroll 16
      for (int t = 0; t < W; ++t) {
        s[t] = F == WeightFormat::q4_1 ? vi{} : quad(x + 36 * W + 4 * t);
        second[t] = vi{};
      }
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        const int line = DotGroup<F>::kNibbles ? j & 3 : j;
        const vi bytes = load_bits<vi>(group.codes + 64 * line + part * kLanes * 4);
        const vi codes = !DotGroup<F>::kNibbles ? bytes : j < 4 ? bytes & 0x0f0f0f0f : vi(vu(bytes) >> 4) & 0x0f0f0f0f;
#pragma GCC unroll 16
        for (int t = 0; t < W; ++t) {
          vi& chain = W <= 2 && j & 1 ? second[t] : s[t];
          chain = dot4(chain, codes, quad(x + 4 * (j * W + t)));
        }
      }
      if (W <= 2)
        for (int t = 0; t < W; ++t) s[t] += second[t];
      add_group<F, W>(group, part, x, s, acc);
    }
    for (int t = 0; t < W; ++t) {
      vf sum[1] = {acc[t]};
      scale_rows<F, 1>(block, part, sum);
      store(out + t * kBlockRows + part * kLanes, sum[0]);
    }
  }
}
#endif

#if PK_AVX2
// Without vpdpbusd: vpmaddubsw adds pairs of products in 16 bits.
// 4-bit codes: |15 x 127 x 2 x 8| < 2^15, so one 16-bit accumulator holds a group of 32 columns.
// All sixteen rows at once, half of the columns at a time: eight registers of codes, and one broadcast of x feeds two
// products. What a token has after the first half waits in memory, where the accumulators live too.
template <int W, bool kSecond>
PK_INLINE void dot_half_q4(const uint8_t* codes, const uint8_t* x, __m256i (&sum)[W][2]) {
  const __m256i low = _mm256_set1_epi8(15);
  __m256i q[4][2];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j)
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      const __m256i bytes = load_bits<__m256i>(codes + 64 * j + 32 * part);
      q[j][part] = _mm256_and_si256(kSecond ? _mm256_srli_epi16(bytes, 4) : bytes, low);
    }
#pragma GCC unroll 8
  for (int t = 0; t < W; ++t) {
    __m256i s[2];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m256i v = (__m256i)quad(x + 4 * ((j + 4 * kSecond) * W + t));
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part) {
        const __m256i pairs = _mm256_maddubs_epi16(q[j][part], v);
        s[part] = j > 0 ? _mm256_add_epi16(s[part], pairs) : kSecond ? _mm256_add_epi16(sum[t][part], pairs) : pairs;
        __asm__("" : "+x"(s[part]));  // keeps the chain: gcc would reassociate it into live products and spill them
      }
    }
    sum[t][0] = s[0];
    sum[t][1] = s[1];
  }
}

template <WeightFormat F, int W>
void dot_tile_q4(const uint8_t* block, int64_t k, const uint8_t* x, float* out) {
  const int64_t groups = k / kGroup;
  const __m256i ones = _mm256_set1_epi16(1);
  vf acc[W][2] = {};
  for (int64_t g = 0; g < groups; ++g, x += kGroupBytes * W) {
    const DotGroup<F> group(block, g, groups);
    __m256i sum[W][2];
    dot_half_q4<W, false>(group.codes, x, sum);
    dot_half_q4<W, true>(group.codes, x, sum);
    const float* scale = reinterpret_cast<const float*>(x + 32 * W);
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      const vf d = group.half(group.scales, part);
      const vf m = F == WeightFormat::q4_1 ? group.half(group.minima, part) : d;
#pragma GCC unroll 8
      for (int t = 0; t < W; ++t) {
        vi s = (vi)_mm256_madd_epi16(sum[t][part], ones);
        if constexpr (F == WeightFormat::q4_0) s += quad(x + 36 * W + 4 * t);
        if constexpr (F == WeightFormat::q4_1) acc[t][part] = fma(m, set1b(scale + W + t), acc[t][part]);
        acc[t][part] = fma(to_float(s), d * set1b(scale + t), acc[t][part]);
      }
    }
  }
  for (int t = 0; t < W; ++t)
    for (int part = 0; part < 2; ++part) store(out + t * kBlockRows + part * kLanes, acc[t][part]);
}

// 8-bit codes: |w| <= 128 unsigned times sign(x, w), pairs at most 128 x 127 x 2 < 2^15, exact for w = -128 too.
template <WeightFormat F, int W>
PK_INLINE void dot_group_q8(const DotGroup<F>& group, int part, const uint8_t* x, vi (&s)[W]) {
  const __m256i flip = _mm256_set1_epi8(char(0x80)), ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int t = 0; t < W; ++t) s[t] = vi{};
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    const __m256i w = _mm256_xor_si256(load_bits<__m256i>(group.codes + 64 * j + 32 * part), flip), size = _mm256_abs_epi8(w);
#pragma GCC unroll 8
    for (int t = 0; t < W; ++t) {
      const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8((__m256i)quad(x + 4 * (j * W + t)), w));
      s[t] += (vi)_mm256_madd_epi16(pairs, ones);
    }
  }
}

template <WeightFormat F, int W>
void dot_tile(const uint8_t* block, int64_t k, const uint8_t* tile, float* out) {
  if constexpr (DotGroup<F>::kNibbles) return dot_tile_q4<F, W>(block, k, tile, out);
  const int64_t groups = k / kGroup;
  for (int part = 0; part < kParts; ++part) {
    vf acc[W] = {};
    const uint8_t* x = tile;
    for (int64_t g = 0; g < groups; ++g, x += kGroupBytes * W) {
      const DotGroup<F> group(block, g, groups);
      vi s[W];
      dot_group_q8<F, W>(group, part, x, s);
      add_group<F, W>(group, part, x, s, acc);
    }
    for (int t = 0; t < W; ++t) {
      vf sum[1] = {acc[t]};
      scale_rows<F, 1>(block, part, sum);
      store(out + t * kBlockRows + part * kLanes, sum[0]);
    }
  }
}
#endif

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
