// Every CPU op: one function per parameter block. Each validates tensor contents (indices) first, on the calling
// thread, and throws std::invalid_argument before anything is written.
#pragma once
#include "../common/params.h"

namespace pk {

void prefill_attention(const PrefillParams&);
void paged_prefill_attention(const PagedPrefillParams&);
void paged_decode_attention(const PagedDecodeParams&);
void merge_attention_states(const MergeParams&);
void append_kv(const AppendParams&);
void rope_append_kv(const RopeAppendParams&);
void gather_kv(const GatherParams&);
void copy_pages(const CopyPagesParams&);
void swap_pages(const SwapPagesParams&);
void sample(const SampleParams&);
void verify_draft(const VerifyParams&);
void philox_uniform(const PhiloxParams&);
void linear(const LinearParams&);
void embedding(const EmbeddingParams&);
void rms_norm(const RmsNormParams&);
void rotary_embedding(const RotaryParams&);
void gated_activation(const GatedActivationParams&);

// Permutes a plain packed weight into the rows16 layout (contract/linear.py). dst has the padded size.
void repack_rows16(const uint8_t* plain, uint8_t* rows16, WeightFormat format, int64_t rows, int64_t columns);

}  // namespace pk
