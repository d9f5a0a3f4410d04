// Words to enums, and parameter blocks from flat argument lists: what is the same for every native module.
#pragma once
#include <stdexcept>
#include <string>
#include <utility>

#include "../common/params.h"

namespace pk {

template <class E>
E pick(const std::string& word, std::initializer_list<std::pair<const char*, E>> table) {
  for (const auto& [name, value] : table)
    if (word == name) return value;
  throw std::invalid_argument("unknown word '" + word + "'");
}

inline WeightFormat weight_format(const std::string& s) {
  using F = WeightFormat;
  return pick<F>(s, {{"dense", F::dense},
                     {"float32", F::float32},
                     {"bfloat16", F::bfloat16},
                     {"float16", F::float16},
                     {"int8", F::int8},
                     {"fp8_e4m3", F::fp8_e4m3},
                     {"q4_0", F::q4_0},
                     {"q4_1", F::q4_1},
                     {"q8_0", F::q8_0}});
}
inline WeightLayout weight_layout(const std::string& s) {
  return pick<WeightLayout>(s, {{"plain", WeightLayout::plain}, {"rows16", WeightLayout::rows16}});
}
inline Activations activations_of(const std::string& s) {
  return pick<Activations>(s, {{"float", Activations::as_float}, {"int8", Activations::as_int8}, {"int16", Activations::as_int16}});
}

// Blocks that hold nothing but N tensors: a function of N tensors.
template <class P, class Indices>
struct Maker;
template <class P, size_t... I>
struct Maker<P, std::index_sequence<I...>> {
  template <size_t>
  using T = Tensor;
  static P make(T<I>... t) { return P{t...}; }
};
template <class P, size_t N>
constexpr auto make() {
  return &Maker<P, std::make_index_sequence<N>>::make;
}

inline PrefillParams make_prefill(Tensor q, Tensor k, Tensor v, Tensor cq, Tensor ck, int64_t mq, int64_t mk, bool causal, double scale,
                                  int64_t left, int64_t right, double cap, Tensor alibi, Tensor sinks, Tensor out, Tensor lse) {
  return {q, k, v, cq, ck, mq, mk, {causal, scale, left, right, cap, alibi, sinks}, out, lse};
}
inline PagedPrefillParams make_paged_prefill(Tensor q, Tensor k, Tensor v, Tensor cq, Tensor table, Tensor lens, int64_t mq, int64_t mk,
                                             Tensor ks, Tensor vs, bool causal, double scale, int64_t left, int64_t right, double cap,
                                             Tensor alibi, Tensor sinks, Tensor out, Tensor lse) {
  return {q, k, v, cq, table, lens, mq, mk, ks, vs, {causal, scale, left, right, cap, alibi, sinks}, out, lse};
}
inline PagedDecodeParams make_paged_decode(Tensor q, Tensor k, Tensor v, Tensor table, Tensor lens, Tensor ks, Tensor vs, bool causal,
                                           double scale, int64_t left, int64_t right, double cap, Tensor alibi, Tensor sinks, int64_t split,
                                           Tensor workspace, Tensor out, Tensor lse) {
  return {q, k, v, table, lens, ks, vs, {causal, scale, left, right, cap, alibi, sinks}, split, workspace, out, lse};
}
inline RopeAppendParams make_rope_append(Tensor q, Tensor k, Tensor v, Tensor pos, Tensor freq, bool interleaved, double scale, Tensor kc,
                                         Tensor vc, Tensor slots, Tensor ks, Tensor vs, Tensor q_out) {
  return {q, k, v, pos, freq, interleaved, scale, kc, vc, slots, ks, vs, q_out};
}
inline SampleParams make_sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions,
                                Tensor repetition, Tensor presence, Tensor frequency, Tensor prompt, Tensor output, Tensor bias,
                                Tensor allowed, const std::string& mode, Tensor ids, Tensor valid, Tensor logprob, Tensor top_ids,
                                Tensor top_logprobs) {
  const auto m = pick<LogprobsMode>(mode, {{"raw", LogprobsMode::raw}, {"processed", LogprobsMode::processed}});
  return {logits, temperature, top_k, top_p,   min_p, seeds, positions, repetition, presence, frequency,
          prompt, output,      bias,  allowed, m,     ids,   valid,     logprob,    top_ids,  top_logprobs};
}
inline LinearParams make_linear(Tensor x, Tensor weight, const std::string& format, const std::string& layout,
                                const std::string& activations, Tensor bias, Tensor residual, Tensor out) {
  return {x, weight, weight_format(format), weight_layout(layout), activations_of(activations), bias, residual, out};
}
inline EmbeddingParams make_embedding(Tensor ids, Tensor weight, int64_t rows, const std::string& format, const std::string& layout,
                                      Tensor out) {
  return {ids, weight, rows, weight_format(format), weight_layout(layout), out};
}
inline RmsNormParams make_rms_norm(Tensor x, Tensor weight, double eps, Tensor residual, Tensor out, Tensor residual_out) {
  return {x, weight, eps, residual, out, residual_out};
}
inline RotaryParams make_rotary(Tensor q, Tensor k, Tensor pos, Tensor freq, bool interleaved, double scale, Tensor q_out, Tensor k_out) {
  return {q, k, pos, freq, interleaved, scale, q_out, k_out};
}
inline GatedActivationParams make_gated_activation(Tensor x, const std::string& kind, Tensor out) {
  return {x, pick<Gate>(kind, {{"silu", Gate::silu}, {"gelu_tanh", Gate::gelu_tanh}}), out};
}

}  // namespace pk
