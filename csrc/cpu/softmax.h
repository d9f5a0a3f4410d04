// Online softmax over rows of scores. Scores come with a positive factor (softmax_scale, or 1 where they have it already) that
// is applied to differences from the peak only: the largest weight is exactly 1, and lse has no rounding but that of its peak.
#pragma once
#include <algorithm>
#include <cmath>

#include "shuffle.h"

namespace pk {

constexpr int kMaxHeadDim = 256;
constexpr int kBlock = 64;                         // keys per step
constexpr int kRowStep = kLanes < 8 ? 8 : kLanes;  // per-row arrays are padded to a multiple of this
constexpr double kLog2e = 1.4426950408889634;
inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// 2^x for x <= 0, within about one unit in the last place; exactly 1 for 0 and exactly 0 for -inf; NaN for NaN.
inline vf exp2_nonpositive(vf x) {
#if PK_AVX512
  const vf n = round_even(x), f = x - n;  // [-0.5, 0.5]
#else
  x = max(set1(-127.f), x);  // this order keeps NaN
  // Adding 1.5 * 2^23 rounds to an integer in the low bits; 127 more makes those bits the exponent field of 2^n.
  const vf magic = set1(12582912.f + 127.f), shifted = x + magic;
  const vf f = x - (shifted - magic);
#endif
  vf p = set1(1.5353360555e-4f);  // minimax in relative error, constant term 1
  p = fma(p, f, set1(1.3398874535e-3f));
  p = fma(p, f, set1(9.6184373641e-3f));
  p = fma(p, f, set1(5.5503324708e-2f));
  p = fma(p, f, set1(2.4022647914e-1f));
  p = fma(p, f, set1(6.9314720286e-1f));
  p = fma(p, f, set1(1.f));
#if PK_AVX512
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);  // NaN x 2^-inf is 0, NaN x 2^NaN is NaN
#else
  return p * as_f(as_i(shifted) << 23);  // a product keeps NaN, adding to the exponent would not
#endif
}

// What each row has met so far: its largest score, the sum of e^(factor * (score - peak)), and by how much its weighted values
// shrink in this step. Arrays of kRowStep-padded length.
struct RowState {
  float *peak, *sum, *shrink;

  void clear(int64_t rows) const {
    for (int64_t i = 0; i < padded(rows, kRowStep); ++i) peak[i] = -kInf, sum[i] = 0.f, shrink[i] = 1.f;
  }
};

// One step: weights e^(factor * (score - peak)) of scores[row][kBlock] go to put(row, key, weights), in vectors [begin, end) of each
// row; -inf becomes 0. A row that has met nothing but -inf keeps peak = -inf and sum = 0 (the 0 that is subtracted instead prevents
// inf - inf).
template <class Put>
inline void softmax_step(const float* scores, int64_t rows, int begin, int end, double factor, RowState state, Put put) {
  constexpr int kFew = kLanes == 16 ? 8 : kLanes;
  const vf scale = set1(float(factor * kLog2e));
  for (int64_t r0 = 0; r0 < rows; r0 += kLanes) {
    const int live = int(std::min<int64_t>(kLanes, rows - r0));
    vf part[kLanes];
    for (int i = 0; i < kLanes; ++i) part[i] = set1(-kInf);
    for (int i = 0; i < live; ++i) {
      const float* s = scores + (r0 + i) * kBlock;
      vf top = load(s + begin * kLanes);
      for (int v = begin + 1; v < end; ++v) top = max(top, load(s + v * kLanes));
      part[i] = top;
    }
    const bool few = kLanes == 16 && live <= kFew;
    const vf before = load(state.peak + r0), peak = max(few ? max_rows<kFew>(part) : max_rows(part), before);
    const vf base = select(peak == set1(-kInf), set1(0.f), peak), shrink = exp2_nonpositive((before - base) * scale);
    store(state.peak + r0, peak);
    store(state.shrink + r0, shrink);
    float bases[kLanes];
    store(bases, base);
    for (int i = 0; i < kLanes; ++i) part[i] = set1(0.f);
    for (int i = 0; i < live; ++i) {
      const float* s = scores + (r0 + i) * kBlock;
      const vf b = set1(bases[i]);
      vf sum = set1(0.f);
      for (int v = begin; v < end; ++v) {
        const vf p = exp2_nonpositive((load(s + v * kLanes) - b) * scale);
        put(r0 + i, v * kLanes, p);
        sum += p;
      }
      part[i] = sum;
    }
    store(state.sum + r0, fma(load(state.sum + r0), shrink, few ? add_rows<kFew>(part) : add_rows(part)));
  }
}

// How a row ends: weighted values times `scale` are its output. `sink` is one more logit in the denominator (natural
// logarithm; -inf when there is none), not part of lse.
struct RowEnd {
  float scale, lse;
};
inline RowEnd finish_row(float peak, float sum, double factor, float sink) {
  if (sum == 0.f) return {0.f, -kInf};  // saw nothing
  const double lse = double(peak) * factor + std::log(double(sum));
  if (sink == -kInf) return {1.f / sum, float(lse)};
  // 1 / (sum + e^(sink - peak)) without overflow: the share of the keys in the whole, over their sum.
  const double share = 1.0 / (1.0 + std::exp(double(sink) - lse));
  return {float(share / double(sum)), float(lse)};
}

}  // namespace pk
