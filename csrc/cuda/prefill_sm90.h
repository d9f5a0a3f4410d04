// Prefill attention for sm_90a: what the kernel is given, and the host function that prefill.cu calls.
#pragma once
#include "prefill.h"
#include "tensor_map.h"

namespace pk::cuda {

// Files named *_sm90.cu are built where sm_90a is among the architectures; elsewhere nothing may refer to them.
#if defined(PK_SM90) || !defined(__CUDACC__)
inline constexpr bool kHasSm90 = true;
#else
inline constexpr bool kHasSm90 = false;
#endif

struct PrefillSm90Args {
  PrefillArgs common;
  HostTensorMap q;     // (dim, head, token), in boxes of 64 columns of `tokens` queries with their group's heads
  HostTensorMap k, v;  // (dim, head, offset, page), in boxes of 64 columns of `box` tokens of one page and head
  int tokens;          // queries of a block
  int box;
  int section;  // pairs of sequence and kv head that share the second-level cache
};

// The arguments must satisfy `prefill_on_wgmma` (tiles.h). `dim` is padded to 64 or 128.
template <class T>
cudaError_t launch_prefill_sm90(const PrefillSm90Args&, int dim, cudaStream_t);
cudaError_t prefill_sm90(PrefillArgs, const Tensor& q, const Tensor& k, const Tensor& v, int64_t max_seqlen_q, int64_t max_seqlen_k,
                         cudaStream_t);

}  // namespace pk::cuda
