// Appends new tokens to a paged KV cache: converts or quantises, and rotates queries and keys first if asked to.
#include "aligned.h"
#include "device/indices.cuh"
#include "device/kv_rows.cuh"
#include "device/rope.cuh"
#include "kernels.h"
#include "launch.h"

namespace pk::cuda {
namespace {

using namespace device;

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Append {
  HeadRows k, v;
  Pool k_pool, v_pool;
  const int64_t* slots;
  int64_t slot_stride;
};

struct RopeAppend {
  Append append;
  HeadRows q, q_out;
  Indices positions;
  const float* inv_freq;
  int pairs;
  bool interleaved, wide;
  float rope_scale;
};

Append append_of(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots, const Tensor& k_scale,
                 const Tensor& v_scale) {
  return {HeadRows(k),
          HeadRows(v),
          Pool(k_cache, k_scale, rows_aligned(k_cache)),
          Pool(v_cache, v_scale, rows_aligned(v_cache)),
          slots.as<const int64_t>(),
          slots.stride[0]};
}

// A warp per row: the kv heads of k, then those of v.
__global__ void __launch_bounds__(kThreads) append_kernel(const Append a) {
  const int64_t token = blockIdx.x, slot = a.slots[token * a.slot_stride];
  if (slot < 0) return;
  for (int i = static_cast<int>(threadIdx.x) / 32; i < a.k.heads + a.v.heads; i += kWarps) {
    const bool is_key = i < a.k.heads;
    const int h = is_key ? i : i - a.k.heads;
    const HeadRows& rows = is_key ? a.k : a.v;
    const void* row = rows.row(token, h);
    store_row(is_key ? a.k_pool : a.v_pool, slot, h, [&](int e) { return load_float(rows.type, row, e); });
  }
}

__global__ void __launch_bounds__(kThreads) rope_append_kernel(const RopeAppend c) {
  PK_DYNAMIC_SHARED(shared);
  const Append& a = c.append;
  const int dim = a.k_pool.dim, thread = static_cast<int>(threadIdx.x);
  float* cosine = reinterpret_cast<float*>(shared);
  float *sine = cosine + c.pairs, *keys = sine + c.pairs;  // [kv_heads][dim], rounded to their own type as two ops would
  const int64_t token = blockIdx.x, slot = a.slots[token * a.slot_stride];
  fill_angles(cosine, sine, c.positions.at(token), c.inv_freq, c.pairs, c.rope_scale);
  __syncthreads();
  const Rotation r{cosine, sine, c.pairs, dim, c.interleaved};
  if (c.wide) {
    rotate_heads<true>(r, c.q, c.q_out, token);
  } else {
    rotate_heads<false>(r, c.q, c.q_out, token);
  }
  if (slot < 0) return;
  const int units = r.units(1);
  for (int i = thread; i < a.k.heads * units; i += kThreads) {
    const int h = i / units;
    rotate_one(r, a.k.type, a.k.row(token, h), i % units, [&](int e, float x) { keys[h * dim + e] = round_float(a.k.type, x); });
  }
  __syncthreads();
  for (int i = thread / 32; i < a.k.heads + a.v.heads; i += kWarps) {
    if (i < a.k.heads) {
      store_row(a.k_pool, slot, i, [&](int e) { return keys[i * dim + e]; });
    } else {
      const int h = i - a.k.heads;
      const void* row = a.v.row(token, h);
      store_row(a.v_pool, slot, h, [&](int e) { return load_float(a.v.type, row, e); });
    }
  }
}

}  // namespace

cudaError_t append_kv(const AppendParams& p, const Launch& on) {
  if (p.k.size[0] == 0) return cudaSuccess;
  const Append call = append_of(p.k, p.v, p.k_cache, p.v_cache, p.slot_mapping, p.k_scale, p.v_scale);
  return launch(append_kernel, {dim3(static_cast<unsigned>(p.k.size[0])), dim3(kThreads)}, on.stream, call);
}

cudaError_t rope_append_kv(const RopeAppendParams& p, const Launch& on) {
  if (p.q.size[0] == 0) return cudaSuccess;
  const auto pairs = static_cast<int>(p.inv_freq.size[0]), dim = static_cast<int>(p.k.size[2]);
  const RopeAppend call{append_of(p.k, p.v, p.k_cache, p.v_cache, p.slot_mapping, p.k_scale, p.v_scale),
                        HeadRows(p.q),
                        HeadRows(p.q_out),
                        Indices(p.positions),
                        p.inv_freq.as<const float>(),
                        pairs,
                        p.interleaved,
                        fills_units(pairs, dim, p.interleaved) && rows_aligned(p.q) && rows_aligned(p.q_out),
                        static_cast<float>(p.rope_scale)};
  const size_t shared = (2 * static_cast<size_t>(pairs) + static_cast<size_t>(p.k.size[1] * dim)) * sizeof(float);
  return launch(rope_append_kernel, {dim3(static_cast<unsigned>(p.q.size[0])), dim3(kThreads), shared}, on.stream, call);
}

}  // namespace pk::cuda
