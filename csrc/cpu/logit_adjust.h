// From the given logits to those that are filtered: float32, bias, allowed tokens, penalties (each step rounded).
#pragma once
#include "dispatch.h"
#include "simd.h"

namespace pk {

// A row of a [vocab] or [batch, vocab] option.
template <class T>
const T* option_row(const Tensor& t, int64_t row) {
  if (!t) return nullptr;
  return t.as<T>() + (t.ndim == 2 ? row * t.stride[0] : 0);
}
inline float option_at(const Tensor& t, int64_t row, float otherwise) { return t ? t.as<float>()[row * t.stride[0]] : otherwise; }

inline Tensor ids_of_row(const Tensor& ids, int64_t row) {
  return {ids.as<char>() + row * ids.stride[0] * size_of(ids.dtype), ids.dtype, 1, {ids.size[1]}, {ids.stride[1]}};
}

template <class T>
void widen(const T* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store_n(out + i, load_n(x + i, int(n - i)), int(n - i));
}

// out = x + bias where allowed, -inf elsewhere; either option may be absent, and out may be x.
inline void bias_and_mask(const float* x, const float* bias, const uint8_t* allowed, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = bias ? x[i] + bias[i] : x[i];
    out[i] = !allowed || allowed[i] ? v : -kInf;
  }
}

struct Penalties {
  float repetition, presence, frequency;

  static Penalties of(const SampleParams& p, int64_t row) {
    return {option_at(p.repetition_penalty, row, 1.f), option_at(p.presence_penalty, row, 0.f), option_at(p.frequency_penalty, row, 0.f)};
  }
  bool none() const { return repetition == 1.f && presence == 0.f && frequency == 0.f; }
};

// Applies the penalties to the tokens of one row of the histories. `counts` is [vocab] of zeros, and is again when done.
// Repetition counts prompt and output, once per distinct token; presence and frequency the output alone.
inline void penalise(float* x, const Tensor& prompt, const Tensor& output, int64_t row, Penalties penalties, int32_t* counts) {
  constexpr int32_t kSeen = 1 << 30;  // beside the number of times that it stands in the output
  auto each = [row](const Tensor& ids, auto&& visit) {
    if (!ids) return;
    const Tensor one = ids_of_row(ids, row);
    for (int64_t i = 0; i < one.size[0]; ++i)
      if (const int64_t id = index_at(one, i); id >= 0) visit(id);
  };
  each(prompt, [&](int64_t id) { counts[id] |= kSeen; });
  each(output, [&](int64_t id) { counts[id] = (counts[id] | kSeen) + 1; });
  auto apply = [&](int64_t id) {
    if (counts[id] == 0) return;  // done already
    const int32_t times = counts[id] & ~kSeen;
    counts[id] = 0;
    float v = x[id];
    if (penalties.repetition != 1.f) v = v > 0 ? v / penalties.repetition : v * penalties.repetition;
    if (times > 0) v = (v - penalties.presence) - penalties.frequency * float(times);
    x[id] = v;
  };
  each(prompt, apply);
  each(output, apply);
}

}  // namespace pk
