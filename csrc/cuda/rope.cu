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

// Rows [tokens][heads], in and out.
struct Heads {
  const void* in;
  void* out;
  int64_t in_token, in_head, out_token, out_head;
  DType in_type, out_type;
  int heads;

  Heads(const Tensor& x, const Tensor& y)
      : in(x.data),
        out(y.data),
        in_token(x.stride[0]),
        in_head(x.stride[1]),
        out_token(y.stride[0]),
        out_head(y.stride[1]),
        in_type(x.dtype),
        out_type(y.dtype),
        heads(static_cast<int>(x.size[1])) {}
};

struct Call {
  Heads q, k;
  Indices positions;
  const float* inv_freq;
  int pairs, head_dim;
  bool interleaved;
  float rope_scale;
};

template <bool kWide>
PK_DEVICE void rotate_heads(const Heads& h, const Rotation& r, int64_t token) {
  const int units = r.units(kWide ? kFloats : 1);
  for (int i = static_cast<int>(threadIdx.x); i < h.heads * units; i += kThreads) {
    const int head = i / units, unit = i % units;
    const void* x = offset(h.in, h.in_type, token * h.in_token + head * h.in_head);
    void* y = offset(h.out, h.out_type, token * h.out_token + head * h.out_head);
    if constexpr (kWide) {
      rotate_wide(r, h.in_type, x, h.out_type, y, unit);
    } else {
      rotate_one(r, h.in_type, x, unit, [&](int e, float value) { store_float(h.out_type, y, e, value); });
    }
  }
}

template <bool kWide>
__global__ void __launch_bounds__(kThreads) rotary_kernel(const Call c) {
  PK_DYNAMIC_SHARED(shared);
  float* cosine = reinterpret_cast<float*>(shared);
  float* sine = cosine + c.pairs;
  const int64_t token = blockIdx.x;
  fill_angles(cosine, sine, c.positions.at(token), c.inv_freq, c.pairs, c.rope_scale);
  __syncthreads();
  const Rotation r{cosine, sine, c.pairs, c.head_dim, c.interleaved};
  rotate_heads<kWide>(c.q, r, token);
  rotate_heads<kWide>(c.k, r, token);
}

}  // namespace

cudaError_t rotary_embedding(const RotaryParams& p, const Launch& on) {
  if (p.q.size[0] == 0) return cudaSuccess;
  const auto pairs = static_cast<int>(p.inv_freq.size[0]), head_dim = static_cast<int>(p.q.size[2]);
  const Call call{{p.q, p.q_out}, {p.k, p.k_out}, Indices(p.positions), p.inv_freq.as<const float>(),
                  pairs,          head_dim,       p.interleaved,        static_cast<float>(p.rope_scale)};
  const bool wide = fills_units(pairs, head_dim, p.interleaved) && rows_aligned(p.q) && rows_aligned(p.k) && rows_aligned(p.q_out) &&
                    rows_aligned(p.k_out);
  const Grid grid{dim3(static_cast<unsigned>(p.q.size[0])), dim3(kThreads), static_cast<size_t>(pairs) * 8};
  return launch(wide ? rotary_kernel<true> : rotary_kernel<false>, grid, on.stream, call);
}

}  // namespace pk::cuda
