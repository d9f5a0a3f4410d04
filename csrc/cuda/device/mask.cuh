// What a query sees, and what is added to its scores: causal and windows (bottom-right aligned), softcap, ALiBi, sinks.
#pragma once
#include <algorithm>
#include <cmath>

#include "common/params.h"
#include "softmax.cuh"

namespace pk::device {

// By value to kernels. Made by `scores_of`.
struct Scores {
  int left, right;   // keys seen on either side of a query's own position; kUnbounded or more: all
  bool transformed;  // by softcap or ALiBi (or a scale that is not positive): scores come out of `transform` in units of log2
  float scale;       // softmax_scale, times log2(e) unless `transformed`
  float cap, inverse_cap;
  const float* slopes;  // [batch, num_heads] with these strides; null if there are none
  int64_t slopes_batch, slopes_head;
  const float* sinks;  // [num_heads], or null

  // What the softmax multiplies scores by.
  PK_DEVICE float softmax_scale() const { return transformed ? 1.f : scale; }
};

constexpr int kUnbounded = 1 << 30;

inline Scores scores_of(const Mask& m) {
  const auto reach = [](int64_t keys) { return keys < 0 || keys > kUnbounded ? kUnbounded : static_cast<int>(keys); };
  const bool transformed = m.softcap > 0 || m.alibi_slopes || !(m.softmax_scale > 0);
  const double scale = transformed ? m.softmax_scale : m.softmax_scale * 1.4426950408889634;
  Scores s{};
  s.left = reach(m.window_left);
  s.right = m.causal ? 0 : reach(m.window_right);
  s.transformed = transformed;
  s.scale = static_cast<float>(scale);
  s.cap = static_cast<float>(m.softcap);
  s.inverse_cap = m.softcap > 0 ? static_cast<float>(1 / m.softcap) : 0.f;
  if (m.alibi_slopes) {
    const bool per_sequence = m.alibi_slopes.ndim == 2;
    s.slopes = m.alibi_slopes.as<const float>();
    s.slopes_batch = per_sequence ? m.alibi_slopes.stride[0] : 0;
    s.slopes_head = m.alibi_slopes.stride[per_sequence ? 1 : 0];
  }
  if (m.sinks) s.sinks = m.sinks.as<const float>();
  return s;
}

// Keys first to last, both included; empty if last < first.
struct Span {
  int first, last;
  PK_DEVICE bool has(int key) const { return key >= first && key <= last; }
};

// The keys that a query at absolute position `position` (row + seqlen_k - seqlen_q) sees.
PK_DEVICE Span seen_by(const Scores& s, int position, int seqlen_k) {
  return {s.left >= kUnbounded ? 0 : max(0, position - s.left),
          s.right >= kUnbounded ? seqlen_k - 1 : min(seqlen_k - 1, position + s.right)};
}

// Column of element i of this lane's fragment, and which of its two rows it belongs to.
PK_DEVICE int column_of(int i) { return i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2; }
PK_DEVICE constexpr int row_of(int i) { return i / 2 % 2; }

// -inf where a row does not see the key. `key0` is the key of column 0. Needed on edge tiles only.
template <int Columns>
PK_DEVICE void hide(float (&s)[Columns], const Span (&seen)[2], int key0) {
#pragma unroll
  for (int i = 0; i < Columns; i++) {
    if (!seen[row_of(i)].has(key0 + column_of(i))) s[i] = -INFINITY;
  }
}

PK_DEVICE float slope_of(const Scores& s, int batch, int head) {
  return s.slopes ? s.slopes[batch * s.slopes_batch + head * s.slopes_head] * kLog2E : 0.f;
}
PK_DEVICE float sink_of(const Scores& s, int head) { return s.sinks ? s.sinks[head] * kLog2E : -INFINITY; }

// Within a few 2^-23 of tanh(x), and without a branch. tanh_approx is 2^-11 off: too much, times a cap of 50.
PK_DEVICE float tanh_of(float x) { return __fmaf_rn(-2.f, reciprocal_approx(exp2_approx(x * (2 * kLog2E)) + 1.f), 1.f); }

// Softcap, then ALiBi by the distance between a row's position and the key (exact below 2^24). `slope` is `slope_of`.
template <int Columns>
PK_DEVICE void transform(float (&x)[Columns], const Scores& s, const int (&position)[2], const float (&slope)[2], int key0) {
  if (s.cap > 0.f) {
    const float inside = s.scale * s.inverse_cap, outside = s.cap * kLog2E;
#pragma unroll
    for (int i = 0; i < Columns; i++) x[i] = outside * tanh_of(x[i] * inside);
  } else {
    const float scale = s.scale * kLog2E;
#pragma unroll
    for (int i = 0; i < Columns; i++) x[i] *= scale;
  }
  if (!s.slopes) return;
  const float distance[2] = {static_cast<float>(position[0] - key0 - column_of(0)), static_cast<float>(position[1] - key0 - column_of(0))};
#pragma unroll
  for (int i = 0; i < Columns; i++) {
    const int column = i / 4 * 8 + i % 2;  // from the lane's first
    x[i] = __fmaf_rn(-slope[row_of(i)], fabsf(distance[row_of(i)] - static_cast<float>(column)), x[i]);
  }
}

}  // namespace pk::device
