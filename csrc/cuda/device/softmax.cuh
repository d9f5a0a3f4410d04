// Online softmax over key tiles, for two rows of a warp's 16-row fragment (g and g + 8; see mma.cuh for the layout).
// Scores become exp2((score - maximum) * scale), so `scale` carries log2(e) unless the scores already do. The difference comes
// first: of large scores the products would round apart, and the largest weight would not be 1.
#pragma once
#include "platform.cuh"

namespace pk::device {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct RowState {
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};  // this lane's columns only, until `finish`

  // Turns scores into weights in place, and returns by how much older sums and outputs shrink. Columns 4j and 4j + 1 of `s`
  // belong to the first row, 4j + 2 and 4j + 3 to the second. `scale` is positive. A tile that a row does not see leaves
  // its state as it was, bit for bit.
  template <int Columns>
  PK_DEVICE void update(float (&s)[Columns], float scale, float (&shrink)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float m = -INFINITY;
#pragma unroll
      for (int i = 0; i < Columns; i += 4) m = fmaxf(m, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
      m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, 1));
      m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, 2));
      m = fmaxf(maximum[r], m);
      const float shift = m == -INFINITY ? 0.f : m;  // -inf - (-inf) must not arise
      shrink[r] = exp2_approx((maximum[r] - shift) * scale);
      maximum[r] = m;
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < Columns; i += 4) {
#pragma unroll
        for (int c = i + 2 * r; c < i + 2 * r + 2; c++) {
          s[c] = exp2_approx((s[c] - shift) * scale);
          total += s[c];
        }
      }
      sum[r] = __fmaf_rn(sum[r], shrink[r], total);
    }
  }

  // Adds up row r over its four lanes. A sink is one more logit of the denominator, in units of log2, -inf if there is
  // none; lse (natural logarithm) leaves it out. Returns what the output is multiplied by: 0 for a row that saw nothing.
  PK_DEVICE float finish(int r, float scale, float sink, float& lse) {
    float total = sum[r];
    total += __shfl_xor_sync(kFullWarp, total, 1);
    total += __shfl_xor_sync(kFullWarp, total, 2);
    lse = total == 0.f ? -INFINITY : (maximum[r] * scale + log2f(total)) * kLn2;
    return total == 0.f ? 0.f : 1.f / (total + exp2f(sink - maximum[r] * scale));
  }
};

}  // namespace pk::device
