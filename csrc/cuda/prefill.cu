// Prefill attention: from the contract's arguments to a launch.
#include "aligned.h"
#include "kernels.h"
#include "prefill_sm90.h"

namespace pk::cuda {
namespace {

using namespace device;

TileSource source_of(const Tensor& t, const Tensor& scales) {
  return {TokenRows(t), Scales(scales), static_cast<int>(t.size[t.ndim - 1] * size_of(t.dtype))};
}

// `k` and `v` are ragged, or the caches.
PrefillProblem problem_of(const Tensor& q, const Tensor& k, const Tensor& v, int capability) {
  const int heads = v.ndim - 2;
  const bool paged = k.ndim == 4;
  return {kHasSm90 ? capability : 0,
          q.size[2],
          v.size[v.ndim - 1],
          v.size[heads] ? q.size[1] / v.size[heads] : 0,
          paged ? k.size[1] : 0,
          is_code(k.dtype),
          rows_aligned(q) && rows_aligned(k) && rows_aligned(v),
          k.size[0] == 0};
}

cudaError_t device_capability(int* out) {
  int device, major, minor;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (status == cudaSuccess) *out = 10 * major + minor;
  return status;
}

cudaError_t run(PrefillArgs a, const Tensor& q, const Tensor& k, const Tensor& v, int64_t max_seqlen_q, int64_t max_seqlen_k,
                const Mask& mask, const Tensor& out, const Tensor& lse, const Launch& launch_on) {
  const int64_t heads = q.size[1], bytes = size_of(out.dtype);
  if (q.size[0] == 0 || heads == 0) return cudaSuccess;
  const int dim = padded_head_dim(std::max(q.size[2], v.size[v.ndim - 1])), rows = prefill_rows(dim);
  a.q = source_of(q, {});
  a.code = v.dtype;
  a.aligned = rows_aligned(q) && rows_aligned(k) && rows_aligned(v) && (a.q.bytes | a.k.bytes | a.v.bytes) % 16 == 0;
  a.out = out.as<char>();
  a.out_row = out.stride[0] * bytes;
  a.out_head = out.stride[1] * bytes;
  a.out_aligned = rows_aligned(out);
  if (lse) {
    a.lse = lse.as<float>();
    a.lse_head = lse.stride[0];
    a.lse_row = lse.stride[1];
  }
  a.scores = scores_of(mask);
  a.kv_heads = static_cast<int>(v.size[v.ndim - 2]);
  a.group = Divider(heads / a.kv_heads);
  a.total_q = static_cast<int>(q.size[0]);
  a.dim_v = static_cast<int>(v.size[v.ndim - 1]);
  int capability;
  if (const cudaError_t status = device_capability(&capability)) return status;
  if constexpr (kHasSm90) {
    if (prefill_on_wgmma(problem_of(q, k, v, capability))) return prefill_sm90(a, q, k, v, max_seqlen_q, max_seqlen_k, launch_on.stream);
  }
  a.row_blocks = static_cast<int>(std::max<int64_t>(1, (max_seqlen_q * a.group.divisor + rows - 1) / rows));
  return q.dtype == DType::f16 ? launch_prefill<__half>(a, dim, launch_on.stream) : launch_prefill<__nv_bfloat16>(a, dim, launch_on.stream);
}

}  // namespace

bool prefill_attention_on_wgmma(const PrefillParams& p, int capability) { return prefill_on_wgmma(problem_of(p.q, p.k, p.v, capability)); }
bool paged_prefill_attention_on_wgmma(const PagedPrefillParams& p, int capability) {
  return prefill_on_wgmma(problem_of(p.q, p.k_cache, p.v_cache, capability));
}

cudaError_t prefill_attention(const PrefillParams& p, const Launch& launch_on) {
  PrefillArgs a{};
  a.k = source_of(p.k, {});
  a.v = source_of(p.v, {});
  a.cu_seqlens_q = p.cu_seqlens_q.as<const int>();
  a.cu_seqlens_k = p.cu_seqlens_k.as<const int>();
  a.batch = static_cast<int>(p.cu_seqlens_q.size[0] - 1);
  return run(a, p.q, p.k, p.v, p.max_seqlen_q, p.max_seqlen_k, p.mask, p.out, p.lse, launch_on);
}

cudaError_t paged_prefill_attention(const PagedPrefillParams& p, const Launch& launch_on) {
  PrefillArgs a{};
  a.k = source_of(p.k_cache, p.k_scale);
  a.v = source_of(p.v_cache, p.v_scale);
  a.cu_seqlens_q = p.cu_seqlens_q.as<const int>();
  a.seqlens_k = p.seqlens_k.as<const int>();
  a.pages.table = p.block_table.as<const int>();
  a.pages.table_stride = p.block_table.stride[0];
  a.pages.page_size = Divider(p.k_cache.size[1]);
  a.batch = static_cast<int>(p.seqlens_k.size[0]);
  return run(a, p.q, p.k_cache, p.v_cache, p.max_seqlen_q, p.max_seqlen_k, p.mask, p.out, p.lse, launch_on);
}

}  // namespace pk::cuda
