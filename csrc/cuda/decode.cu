// Decode attention: from the contract's arguments to the launches of the splits and of their merge.
#include "aligned.h"
#include "decode.h"
#include "kernels.h"
#include "launch.h"

namespace pk::cuda {
namespace {

int64_t splits_of(const PagedDecodeParams& p) { return most_splits(p.split_size, p.block_table.size[1] * p.k_cache.size[1]); }

Decode decode_of(const PagedDecodeParams& p, const Launch& on) {
  Decode c{};
  c.q = p.q.data;
  c.q_sequence = p.q.stride[0];
  c.q_head = p.q.stride[1];
  c.k = TokenRows(p.k_cache);
  c.v = TokenRows(p.v_cache);
  c.pages = {p.block_table.as<const int>(), p.block_table.stride[0], Divider(p.k_cache.size[1])};
  c.k_scale = Scales(p.k_scale);
  c.v_scale = Scales(p.v_scale);
  c.code = p.k_cache.dtype;
  c.seqlens = p.seqlens_k.as<const int>();
  c.seqlens_stride = p.seqlens_k.stride[0];
  c.scores = scores_of(p.mask);
  c.requested_split = static_cast<int>(std::min<int64_t>(p.split_size, INT32_MAX));  // divided by: 32 bits suffice
  c.most_splits = splits_of(p);
  c.heads = static_cast<int>(p.q.size[1]);
  c.kv_heads = static_cast<int>(p.k_cache.size[2]);
  c.dim = static_cast<int>(p.q.size[2]);
  c.dim_v = static_cast<int>(p.v_cache.size[3]);
  const int64_t row_bytes = size_of(p.k_cache.dtype) * (c.dim | c.dim_v);
  c.wide = rows_aligned(p.q) && rows_aligned(p.k_cache) && rows_aligned(p.v_cache) && row_bytes % 16 == 0;
  c.partial = static_cast<float*>(on.scratch);
  c.out = p.out.data;
  c.type = p.out.dtype;
  c.out_sequence = p.out.stride[0];
  c.out_head = p.out.stride[1];
  if (p.lse) {
    c.lse = p.lse.as<float>();
    c.lse_head = p.lse.stride[0];
    c.lse_sequence = p.lse.stride[1];
  }
  return c;
}

// The splits of one (head, sequence) that have seen keys, in order, to its row of out.
__global__ void __launch_bounds__(kThreads) merge_splits_kernel(const __grid_constant__ Decode c) {
  const int head = static_cast<int>(blockIdx.x), sequence = static_cast<int>(blockIdx.y), seqlen = c.seqlens[sequence * c.seqlens_stride];
  const int size = split_size(c, seqlen);
  const Span seen = seen_by(c.scores, seqlen - 1, seqlen);
  const int first = seen.first / size,
            splits = seen.last < seen.first ? 0 : min(seen.last / size + 1, static_cast<int>(c.most_splits)) - first;
  const float* partial = partial_of(c, sequence, head, first);
  const int64_t stride = partial_floats(c.dim_v);
  float peak = -INFINITY, total = 0.f;
  for (int i = 0; i < splits; i++) peak = fmaxf(peak, partial[i * stride + c.dim_v]);
  const float base = peak == -INFINITY ? 0.f : peak;
  for (int i = 0; i < splits; i++) total += exp2f(partial[i * stride + c.dim_v] - base) * partial[i * stride + c.dim_v + 1];
  const float scale = total == 0.f ? 0.f : 1.f / (total + exp2f(sink_of(c.scores, head) - base));
  if (threadIdx.x == 0 && c.lse) {
    c.lse[head * c.lse_head + sequence * c.lse_sequence] = total == 0.f ? -INFINITY : (peak + log2f(total)) * kLn2;
  }
  for (int column = static_cast<int>(threadIdx.x); column < c.dim_v; column += kThreads) {
    float value = 0.f;
    for (int i = 0; i < splits; i++) value += exp2f(partial[i * stride + c.dim_v] - base) * partial[i * stride + column];
    store_float(c.type, c.out, sequence * c.out_sequence + head * c.out_head + column, value * scale);
  }
}

}  // namespace

int64_t paged_decode_attention_scratch_bytes(const PagedDecodeParams& p) {
  const int64_t floats = (p.v_cache.size[3] + 2 + 3) / 4 * 4;
  return p.q.size[0] * p.q.size[1] * splits_of(p) * floats * static_cast<int64_t>(sizeof(float));
}

cudaError_t paged_decode_attention(const PagedDecodeParams& p, const Launch& on) {
  if (p.q.size[0] == 0) return cudaSuccess;
  if (p.q.dtype != DType::f16 && p.q.dtype != DType::bf16) return cudaErrorInvalidValue;
  const Decode c = decode_of(p, on);
  const auto batch = static_cast<unsigned>(p.q.size[0]);
  const int dim = padded_head_dim(std::max(c.dim, c.dim_v));
  const cudaError_t status =
      p.q.dtype == DType::f16 ? launch_splits<__half>(c, dim, batch, on.stream) : launch_splits<__nv_bfloat16>(c, dim, batch, on.stream);
  if (status != cudaSuccess) return status;
  return launch(merge_splits_kernel, {dim3(static_cast<unsigned>(c.heads), batch), dim3(kThreads)}, on.stream, c);
}

}  // namespace pk::cuda
