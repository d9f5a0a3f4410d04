// Rotary position embedding of queries and keys: a block per token.
#include "aligned.h"
#include "device/indices.cuh"
#include "device/rope.cuh"
#include "kernels.h"
#include "launch.h"

namespace pk::cuda {
namespace {

using namespace device;

constexpr int kThreads = 256;

struct Call {
  HeadRows q, q_out, k, k_out;
  Indices positions;
  const float* inv_freq;
  int pairs, head_dim;
  bool interleaved;
  float rope_scale;
};

template <bool kWide>
__global__ void __launch_bounds__(kThreads) rotary_kernel(const Call c) {
  PK_DYNAMIC_SHARED(shared);
  float* cosine = reinterpret_cast<float*>(shared);
  float* sine = cosine + c.pairs;
  const int64_t token = blockIdx.x;
  fill_angles(cosine, sine, c.positions.at(token), c.inv_freq, c.pairs, c.rope_scale);
  __syncthreads();
  const Rotation r{cosine, sine, c.pairs, c.head_dim, c.interleaved};
  rotate_heads<kWide>(r, c.q, c.q_out, token);
  rotate_heads<kWide>(r, c.k, c.k_out, token);
}

}  // namespace

cudaError_t rotary_embedding(const RotaryParams& p, const Launch& on) {
  if (p.q.size[0] == 0) return cudaSuccess;
  const auto pairs = static_cast<int>(p.inv_freq.size[0]), head_dim = static_cast<int>(p.q.size[2]);
  const bool wide = fills_units(pairs, head_dim, p.interleaved) && rows_aligned(p.q) && rows_aligned(p.k) && rows_aligned(p.q_out) &&
                    rows_aligned(p.k_out);
  const Call call{HeadRows(p.q),
                  HeadRows(p.q_out),
                  HeadRows(p.k),
                  HeadRows(p.k_out),
                  Indices(p.positions),
                  p.inv_freq.as<const float>(),
                  pairs,
                  head_dim,
                  p.interleaved,
                  static_cast<float>(p.rope_scale)};
  const Grid grid{dim3(static_cast<unsigned>(p.q.size[0])), dim3(kThreads), static_cast<size_t>(pairs) * 8};
  return launch(wide ? rotary_kernel<true> : rotary_kernel<false>, grid, on.stream, call);
}

}  // namespace pk::cuda
