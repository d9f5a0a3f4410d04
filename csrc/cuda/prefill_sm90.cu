// Prefill attention for sm_90a: tensor maps and tile choice, then the kernel for the type.
#include <numeric>

#include "prefill_sm90.h"

namespace pk::cuda {
namespace {

constexpr uint32_t kPanel = 64;  // columns of a box: the 128 bytes that the swizzle spans

// Appends a dimension. A stride over nothing is not read, but must look like one.
void add(TensorMapSpec& s, int64_t size, int64_t stride, uint32_t box) {
  s.size[s.rank] = static_cast<uint64_t>(size);
  s.stride_bytes[s.rank] = s.rank > 0 && size == 1 ? 16 : static_cast<uint64_t>(stride) * 2;
  s.box[s.rank++] = box;
}

TensorMapSpec spec_of(const Tensor& t) {
  TensorMapSpec s{t.data, t.dtype == DType::f16 ? TensorType::f16 : TensorType::bf16, 0, {}, {}, {}, TensorSwizzle::bytes128};
  add(s, t.size[t.ndim - 1], 1, kPanel);
  return s;
}

cudaError_t encode_queries(const Tensor& q, int group, int tokens, HostTensorMap* out) {
  TensorMapSpec s = spec_of(q);
  add(s, q.size[1], q.stride[1], static_cast<uint32_t>(group));
  add(s, q.size[0], q.stride[0], static_cast<uint32_t>(tokens));
  return encode(s, out);
}

// [pages, page_size, kv_heads, dim], or [tokens, kv_heads, dim] as one page.
cudaError_t encode_keys(const Tensor& t, int box, HostTensorMap* out) {
  TensorMapSpec s = spec_of(t);
  const int token = t.ndim - 3;
  add(s, t.size[token + 1], t.stride[token + 1], 1);
  add(s, t.size[token], t.stride[token], static_cast<uint32_t>(box));
  add(s, token ? t.size[0] : 1, token ? t.stride[0] : 0, 1);
  return encode(s, out);
}

}  // namespace

cudaError_t prefill_sm90(PrefillArgs a, const Tensor& q, const Tensor& k, const Tensor& v, int64_t max_seqlen_q, int64_t max_seqlen_k,
                         cudaStream_t stream) {
  const int dim = padded_head_dim(std::max(q.size[2], int64_t{a.dim_v}));
  PrefillSm90Args p{};
  p.tokens = prefill_sm90_rows(dim) / a.group.divisor;
  p.box = a.pages.table ? prefill_sm90_box(k.size[1]) : kPrefillSm90Keys;
  p.section = static_cast<int>(cached_heads(max_seqlen_k, dim));
  a.row_blocks = static_cast<int>(std::max<int64_t>(1, (max_seqlen_q + p.tokens - 1) / p.tokens));
  p.common = a;
  cudaError_t status = encode_queries(q, a.group.divisor, p.tokens, &p.q);
  if (status == cudaSuccess) status = encode_keys(k, p.box, &p.k);
  if (status == cudaSuccess) status = encode_keys(v, p.box, &p.v);
  if (status != cudaSuccess) return status;
  return q.dtype == DType::f16 ? launch_prefill_sm90<__half>(p, dim, stream) : launch_prefill_sm90<__nv_bfloat16>(p, dim, stream);
}

}  // namespace pk::cuda
