// Products with a dense row-major weight [rows, k] of any row stride. Lanes are columns: both operands are loaded, four
// weight rows by a few tokens at a time, so that every load serves several products. Each output is a sum over chunks of
// columns in order, lanes added at the end: the same for every tile size.
#pragma once
#include "row_block.h"

namespace pk {

constexpr int kDenseRows = 4;
constexpr int kDenseWidth = kLanes == 16 ? 6 : 3;  // AVX2: 12 accumulators, 3 tokens, 1 weight
constexpr int64_t kDenseChunk = 32;                // vectors summed before they join the total

template <class T>
struct DenseTile {
  const T* w;  // the first of `rows` weight rows
  int64_t w_stride;
  const float* x;  // the first token
  int64_t x_stride, k;
};

template <class T, int R, int W>
PK_INLINE void dense_step(const DenseTile<T>& d, int64_t c, int lanes, vf (&sum)[W][R]) {
  vf x[W];
#pragma GCC unroll 8
  for (int t = 0; t < W; ++t) x[t] = load_n(d.x + t * d.x_stride + c, lanes);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const vf w = load_n(d.w + r * d.w_stride + c, lanes);
#pragma GCC unroll 8
    for (int t = 0; t < W; ++t) sum[t][r] = fma(w, x[t], sum[t][r]);
  }
}

// R rows by W tokens: out[W][16].
template <class T, int R, int W>
void dense_tile(const DenseTile<T>& d, float* out) {
  vf total[W][R] = {};
  for (int64_t c0 = 0; c0 < d.k; c0 += kDenseChunk * kLanes) {
    const int64_t end = c0 + kDenseChunk * kLanes < d.k ? c0 + kDenseChunk * kLanes : d.k;
    vf sum[W][R];
#pragma GCC unroll 8
    for (int t = 0; t < W; ++t)
      for (int r = 0; r < R; ++r) sum[t][r] = set1(0.f);
    int64_t c = c0;
    for (; c + kLanes <= end; c += kLanes) dense_step<T, R, W>(d, c, kLanes, sum);
    if (c < end) dense_step<T, R, W>(d, c, int(end - c), sum);
#pragma GCC unroll 8
    for (int t = 0; t < W; ++t)
      for (int r = 0; r < R; ++r) total[t][r] += sum[t][r];
  }
  for (int t = 0; t < W; ++t)
    for (int r = 0; r < R; ++r) out[t * kBlockRows + r] = reduce_add(total[t][r]);
}

// Up to 16 weight rows by W tokens.
template <class T, int W>
void dense_block(DenseTile<T> d, int rows, float* out) {
  int r = 0;
  for (; r + kDenseRows <= rows; r += kDenseRows, d.w += kDenseRows * d.w_stride) dense_tile<T, kDenseRows, W>(d, out + r);
  for (; r < rows; ++r, d.w += d.w_stride) dense_tile<T, 1, W>(d, out + r);
}

}  // namespace pk
