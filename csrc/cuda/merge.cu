// Attention over the union of two disjoint key sets, from the results over each: a warp per (token, head).
#include "device/floats.cuh"
#include "kernels.h"
#include "launch.h"

namespace pk::cuda {
namespace {

using namespace device;

constexpr int kThreads = 128, kWarps = kThreads / 32;

// Results of attention: out [tokens, heads, dim], lse [heads, tokens].
struct State {
  void* out;
  float* lse;
  int64_t token, head, lse_head, lse_token;

  State(const Tensor& o, const Tensor& l)
      : out(o.data), lse(l.as<float>()), token(o.stride[0]), head(o.stride[1]), lse_head(l.stride[0]), lse_token(l.stride[1]) {}
  PK_DEVICE int64_t at(int64_t t, int64_t h) const { return t * token + h * head; }
  PK_DEVICE float& lse_at(int64_t t, int64_t h) const { return lse[h * lse_head + t * lse_token]; }
};

struct Call {
  State a, b, merged;
  DType type;
  int64_t rows;
  int heads, dim;
};

// A side whose lse is -inf contributes nothing, whatever it holds.
__global__ void __launch_bounds__(kThreads) merge_kernel(const Call c) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= c.rows) return;
  const int64_t t = row / c.heads, h = row % c.heads;
  const float lse_a = c.a.lse_at(t, h), lse_b = c.b.lse_at(t, h);
  const bool empty_a = lse_a == -INFINITY, empty_b = lse_b == -INFINITY;
  const float peak = empty_a ? lse_b : empty_b ? lse_a : fmaxf(lse_a, lse_b);
  const float share_a = empty_a ? 0.f : expf(lse_a - peak), share_b = empty_b ? 0.f : expf(lse_b - peak), total = share_a + share_b;
  for (int e = static_cast<int>(threadIdx.x) % 32; e < c.dim; e += 32) {
    float y = 0.f;
    if (!empty_a) y = load_float(c.type, c.a.out, c.a.at(t, h) + e) * (share_a / total);
    if (!empty_b) y = __fmaf_rn(load_float(c.type, c.b.out, c.b.at(t, h) + e), share_b / total, y);
    store_float(c.type, c.merged.out, c.merged.at(t, h) + e, y);
  }
  if (threadIdx.x % 32 == 0) c.merged.lse_at(t, h) = empty_a && empty_b ? -INFINITY : peak + logf(total);
}

}  // namespace

cudaError_t merge_attention_states(const MergeParams& p, const Launch& on) {
  const int64_t rows = p.out.size[0] * p.out.size[1];
  if (rows == 0) return cudaSuccess;
  const Call call{{p.out_a, p.lse_a},
                  {p.out_b, p.lse_b},
                  {p.out, p.lse},
                  p.out.dtype,
                  rows,
                  static_cast<int>(p.out.size[1]),
                  static_cast<int>(p.out.size[2])};
  return launch(merge_kernel, {dim3(static_cast<unsigned>((rows + kWarps - 1) / kWarps)), dim3(kThreads)}, on.stream, call);
}

}  // namespace pk::cuda
