// Launches decode attention, and the merge of two partial results.
#include "aligned.h"
#include "decode.cuh"
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
  c.requested_split = p.split_size;
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

template <class T, int D, bool kCodes>
cudaError_t run(const Decode& c, unsigned batch, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(c.kv_heads * ((c.group() + kRows - 1) / kRows));
  const Grid splits{dim3(static_cast<unsigned>(c.most_splits), rows, batch), dim3(kThreads), decode_shared_bytes<D, kCodes>()};
  const cudaError_t status = launch(decode_kernel<T, D, kCodes>, splits, stream, c);
  if (status != cudaSuccess) return status;
  return launch(merge_splits_kernel<T>, {dim3(static_cast<unsigned>(c.heads), batch), dim3(kThreads)}, stream, c);
}

template <class T, int D>
cudaError_t run_cache(const Decode& c, unsigned batch, cudaStream_t stream) {
  return is_code(c.code) ? run<T, D, true>(c, batch, stream) : run<T, D, false>(c, batch, stream);
}

template <class T>
cudaError_t run_dim(const Decode& c, unsigned batch, cudaStream_t stream) {
  switch (padded_head_dim(std::max(c.dim, c.dim_v))) {
    case 64:
      return run_cache<T, 64>(c, batch, stream);
    case 128:
      return run_cache<T, 128>(c, batch, stream);
    default:
      return run_cache<T, 256>(c, batch, stream);
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
  return p.q.dtype == DType::f16 ? run_dim<__half>(c, batch, on.stream) : run_dim<__nv_bfloat16>(c, batch, on.stream);
}

}  // namespace pk::cuda
