// Parameter blocks, one per op, with the fields of pykernels/contract/<family>.py in the same order.
// Plain data: copied into recorded plans, passed by value to GPU kernels.
#pragma once
#include "dtype.h"

namespace pk {

constexpr int kMaxDims = 4;

// A strided view of memory that somebody else owns. Absent optional tensors have data == nullptr and ndim == -1.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  int32_t ndim = -1;
  int64_t size[kMaxDims] = {};
  int64_t stride[kMaxDims] = {};  // in elements

  explicit operator bool() const { return ndim >= 0; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

enum class WeightFormat : int32_t { dense, float32, bfloat16, float16, int8, fp8_e4m3, q4_0, q4_1, q8_0 };
enum class WeightLayout : int32_t { plain, rows16 };
enum class Activations : int32_t { as_float, as_int8, as_int16 };
enum class Gate : int32_t { silu, gelu_tanh };
enum class LogprobsMode : int32_t { raw, processed };

struct Mask {
  bool causal;
  double softmax_scale;
  int64_t window_left, window_right;  // -1: unbounded
  double softcap;                     // 0: off
  Tensor alibi_slopes, sinks;
};

struct PrefillParams {
  Tensor q, k, v, cu_seqlens_q, cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  Mask mask;
  Tensor out, lse;
};

struct PagedPrefillParams {
  Tensor q, k_cache, v_cache, cu_seqlens_q, block_table, seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  Tensor k_scale, v_scale;
  Mask mask;
  Tensor out, lse;
};

struct PagedDecodeParams {
  Tensor q, k_cache, v_cache, block_table, seqlens_k, k_scale, v_scale;
  Mask mask;
  int64_t split_size;
  Tensor workspace, out, lse;
};

struct MergeParams {
  Tensor out_a, lse_a, out_b, lse_b, out, lse;
};

struct AppendParams {
  Tensor k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale;
};

struct RopeAppendParams {
  Tensor q, k, v, positions, inv_freq;
  bool interleaved;
  double rope_scale;
  Tensor k_cache, v_cache, slot_mapping, k_scale, v_scale, q_out;
};

struct GatherParams {
  Tensor k_cache, v_cache, block_table, seqlens_k, k_scale, v_scale, k, v;
};

struct CopyPagesParams {
  Tensor k_cache, v_cache, src_pages, dst_pages, k_scale, v_scale;
};

struct SwapPagesParams {
  Tensor k_from, v_from, k_to, v_to, src_pages, dst_pages, k_scale_from, v_scale_from, k_scale_to, v_scale_to;
};

struct SampleParams {
  Tensor logits, temperature, top_k, top_p, min_p, seeds, positions;
  Tensor repetition_penalty, presence_penalty, frequency_penalty, prompt_ids, output_ids, logit_bias, allowed_mask;
  LogprobsMode logprobs_mode;
  Tensor ids, valid, logprob, top_ids, top_logprobs;
};

struct VerifyParams {
  Tensor target_logits, draft_ids, draft_probs, cu_draft, temperature, top_k, top_p, min_p, seeds, positions;
  Tensor ids, num_accepted;
};

struct PhiloxParams {
  Tensor seeds, positions, out;
};

struct LinearParams {
  Tensor x, weight;
  WeightFormat format;
  WeightLayout layout;
  Activations activations;
  Tensor bias, residual, out;
};

struct EmbeddingParams {
  Tensor ids, weight;
  int64_t num_embeddings;
  WeightFormat format;
  WeightLayout layout;
  Tensor out;
};

struct RmsNormParams {
  Tensor x, weight;
  double eps;
  Tensor residual, out, residual_out;
};

struct RotaryParams {
  Tensor q, k, positions, inv_freq;
  bool interleaved;
  double rope_scale;
  Tensor q_out, k_out;
};

struct GatedActivationParams {
  Tensor x;
  Gate kind;
  Tensor out;
};

}  // namespace pk
