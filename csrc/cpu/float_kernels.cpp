// Products with activations in floats: weights widened in registers, float32 fused multiply-adds.
//
// Lanes are weight rows, activations are broadcast, so there is no horizontal sum. Every output is the sum of its chunks
// in order, and a chunk the sum of its columns in order: the same for every tile width, so that a token's bits do not
// depend on its neighbours, and short chains keep the rounding error small.
#include <utility>

#include "row_block.h"
#include "tile_kernels.h"

namespace pk {
namespace {

constexpr int kFloatParts = kLanes == 8 ? 2 : 1;

template <WeightFormat F, int W>
void float_tile(const uint8_t* block, int64_t k, const uint8_t* tile, float* out) {
  constexpr int P = kFloatParts, kChunk = RowBlock<F>::kChunk;
  const float* x = reinterpret_cast<const float*>(tile);  // [k][W]
  for (int part = 0; part < kParts; part += P) {
    vf total[W][P] = {};
    for (int64_t c0 = 0; c0 < k; c0 += kChunk) {
      const float* columns = x + c0 * W;
      vf sum[W][P];
#pragma GCC unroll 16
      for (int t = 0; t < W; ++t)
        for (int p = 0; p < P; ++p) sum[t][p] = set1(0.f);
      RowBlock<F>::template columns<P>(block, k, c0, int(k - c0 < kChunk ? k - c0 : kChunk), part,
                                       [&](int c, const Rows<P>& w) __attribute__((always_inline)) {
#pragma GCC unroll 16
                                         for (int t = 0; t < W; ++t) {
                                           const vf xt = set1(columns[c * W + t]);
#pragma GCC unroll 2
                                           for (int p = 0; p < P; ++p) sum[t][p] = fma(w.v[p], xt, sum[t][p]);
                                         }
                                       });
#pragma GCC unroll 16
      for (int t = 0; t < W; ++t)
        for (int p = 0; p < P; ++p) total[t][p] += sum[t][p];
    }
    for (int t = 0; t < W; ++t) {
      scale_rows<F, P>(block, part, total[t]);
      for (int p = 0; p < P; ++p) store(out + t * kBlockRows + (part + p) * kLanes, total[t][p]);
    }
  }
}

// bfloat16 weights and bfloat16 activations where the hardware multiplies pairs of them (or where that is emulated).
#if (PK_AVX512 && defined(__AVX512BF16__)) || defined(PK_EMULATE_512)
constexpr bool kPairProducts = true;
inline vf dot_pairs(vf sum, vi a, vi b) {
#if PK_AVX512
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#else
  return fma(bf16_even(a), bf16_even(b), fma(bf16_odd(a), bf16_odd(b), sum));
#endif
}
#else
constexpr bool kPairProducts = false;
inline vf dot_pairs(vf sum, vi, vi) { return sum; }
#endif

// x is [ceil(k / 2)][W] pairs, the last one padded with zero.
template <int W>
void pair_tile(const uint8_t* block, int64_t k, const uint8_t* tile, float* out) {
  constexpr int kPairs = RowBlock<WeightFormat::bfloat16>::kChunk / 2;
  const int32_t* x = reinterpret_cast<const int32_t*>(tile);
  for (int part = 0; part < kParts; ++part) {
    vf total[W] = {};
    for (int64_t first = 0; first < k / 2; first += kPairs) {
      const int64_t end = first + kPairs < k / 2 ? first + kPairs : k / 2;
      vf sum[W] = {};
#pragma GCC unroll 4
      for (int64_t i = first; i < end; ++i) {
        const vi w = load_bits<vi>(block + (i * kBlockRows + part * kLanes) * 4);
#pragma GCC unroll 16
        for (int t = 0; t < W; ++t) sum[t] = dot_pairs(sum[t], w, set1i(x[i * W + t]));
      }
#pragma GCC unroll 16
      for (int t = 0; t < W; ++t) total[t] += sum[t];
    }
    if (k & 1) {
      const vf w = load(reinterpret_cast<const bf16*>(block) + (k - 1) * kBlockRows + part * kLanes);
      for (int t = 0; t < W; ++t) total[t] = fma(w, bf16_even(set1i(x[k / 2 * W + t])), total[t]);
    }
    for (int t = 0; t < W; ++t) store(out + t * kBlockRows + part * kLanes, total[t]);
  }
}

template <WeightFormat F, int... I>
constexpr TileKernels float_widths(std::integer_sequence<int, I...>) {
  return {float_tile<F, I + 1>...};
}
template <int... I>
constexpr TileKernels pair_widths(std::integer_sequence<int, I...>) {
  return {pair_tile<I + 1>...};
}
using Widths = std::make_integer_sequence<int, kFloatWidth>;

}  // namespace

const TileKernels& float_kernels(WeightFormat format) {
  using F = WeightFormat;
  static constexpr TileKernels table[] = {float_widths<F::float32>(Widths{}),  float_widths<F::bfloat16>(Widths{}),
                                          float_widths<F::float16>(Widths{}),  float_widths<F::int8>(Widths{}),
                                          float_widths<F::fp8_e4m3>(Widths{}), float_widths<F::q4_0>(Widths{}),
                                          float_widths<F::q4_1>(Widths{}),     float_widths<F::q8_0>(Widths{})};
  return table[int(format) - int(F::float32)];
}

const TileKernels* pair_kernels() {
  if constexpr (kPairProducts) {
    static constexpr TileKernels pairs = pair_widths(Widths{});
    return &pairs;
  }
  return nullptr;
}

}  // namespace pk
