// The self-test's attention problem: one head layout, causal or not, for kernels that prove the emulation, not for users.
#pragma once
#include "cuda/device/platform.cuh"
#include "cuda/launch.h"

namespace pk::selftest {

// q, out [batch, seqlen_q, heads, D]; k, v [batch, seqlen_k, kv_heads, D]; causal is bottom-right aligned.
struct AttentionProblem {
  const void *q, *k, *v;
  void* out;
  int batch, heads, kv_heads, seqlen_q, seqlen_k;
  float scale_log2;
  int causal;
};

// Online softmax of one 16-row fragment: rows g and g + 8 of a warp's S, 8 * Tiles columns.
struct RowState {
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};

  // Turns scores into probabilities in place and returns by how much older sums shrink.
  template <int Columns>
  PK_DEVICE void update(float (&s)[Columns], float scale_log2, float (&shrink)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float m = maximum[r];
#pragma unroll
      for (int i = 0; i < Columns; i++) {
        if ((i >> 1 & 1) == r) m = fmaxf(m, s[i]);
      }
      m = fmaxf(m, __shfl_xor_sync(device::kFullWarp, m, 1));
      m = fmaxf(m, __shfl_xor_sync(device::kFullWarp, m, 2));
      const float shift = m == -INFINITY ? 0.f : m * scale_log2;
      shrink[r] = device::exp2_approx(maximum[r] * scale_log2 - shift);
      maximum[r] = m;
      sum[r] *= shrink[r];
#pragma unroll
      for (int i = 0; i < Columns; i++) {
        if ((i >> 1 & 1) != r) continue;
        s[i] = device::exp2_approx(s[i] * scale_log2 - shift);
        sum[r] += s[i];
      }
    }
  }

  PK_DEVICE void finish(float (&inverse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      sum[r] += __shfl_xor_sync(device::kFullWarp, sum[r], 1);
      sum[r] += __shfl_xor_sync(device::kFullWarp, sum[r], 2);
      inverse[r] = sum[r] > 0.f ? 1.f / sum[r] : 0.f;
    }
  }
};

// -inf where column `column0 + 8 j + ...` of the fragment is past the keys or, if causal, past `row + offset`.
template <int Columns>
PK_DEVICE void mask_scores(float (&s)[Columns], const AttentionProblem& p, int row, int column0) {
  const int quad = threadIdx.x % 4, offset = p.seqlen_k - p.seqlen_q;
#pragma unroll
  for (int i = 0; i < Columns; i++) {
    const int column = column0 + i / 4 * 8 + quad * 2 + i % 2, r = row + (i >> 1 & 1) * 8;
    if (column >= p.seqlen_k || (p.causal && column > r + offset)) s[i] = -INFINITY;
  }
}

}  // namespace pk::selftest
