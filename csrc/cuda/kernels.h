// The launchers of the CUDA backend: one declaration per op. Each enqueues on a stream and returns the status of its
// launches; none synchronises or allocates. Memory for partial results comes from the caller: `<op>_scratch_bytes` says
// how much, exactly, from shapes alone (never from device data, so that a captured graph stays valid).
#pragma once
#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include <cuda_runtime_api.h>
#endif

#include "common/params.h"

namespace pk::cuda {

struct Launch {
  cudaStream_t stream = nullptr;
  void* scratch = nullptr;  // aligned to 16 bytes
};

int64_t paged_decode_attention_scratch_bytes(const PagedDecodeParams&);
cudaError_t paged_decode_attention(const PagedDecodeParams&, const Launch&);
cudaError_t merge_attention_states(const MergeParams&, const Launch&);

cudaError_t append_kv(const AppendParams&, const Launch&);
cudaError_t rope_append_kv(const RopeAppendParams&, const Launch&);
cudaError_t gather_kv(const GatherParams&, const Launch&);
int64_t copy_pages_scratch_bytes(const CopyPagesParams&);
cudaError_t copy_pages(const CopyPagesParams&, const Launch&);
cudaError_t swap_pages(const SwapPagesParams&, const Launch&);

int64_t sample_scratch_bytes(const SampleParams&);
cudaError_t sample(const SampleParams&, const Launch&);
int64_t verify_draft_scratch_bytes(const VerifyParams&);
cudaError_t verify_draft(const VerifyParams&, const Launch&);
cudaError_t philox_uniform(const PhiloxParams&, const Launch&);

cudaError_t linear(const LinearParams&, const Launch&);
cudaError_t embedding(const EmbeddingParams&, const Launch&);

cudaError_t prefill_attention(const PrefillParams&, const Launch&);
cudaError_t paged_prefill_attention(const PagedPrefillParams&, const Launch&);
// Whether a device of this compute capability (10 x major + minor) would run them on the kernel for sm_90a.
bool prefill_attention_on_wgmma(const PrefillParams&, int capability);
bool paged_prefill_attention_on_wgmma(const PagedPrefillParams&, int capability);

cudaError_t rms_norm(const RmsNormParams&, const Launch&);
cudaError_t rotary_embedding(const RotaryParams&, const Launch&);
cudaError_t gated_activation(const GatedActivationParams&, const Launch&);

}  // namespace pk::cuda
