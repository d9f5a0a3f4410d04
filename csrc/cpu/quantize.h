// Activations to 8 bits: groups of 32 columns, scale = amax / 127, code = rint(x * (127 / amax)), float32 throughout.
#pragma once
#include "simd.h"
#include "weight_layout.h"

namespace pk {

// One group: codes in four bytes per word, the scale, and the sum of the codes.
struct QuantisedGroup {
  uint32_t quads[kGroup / 4];
  float scale;
  int32_t sum;
};

template <class T>
inline QuantisedGroup quantise_group(const T* x) {
  constexpr int N = kGroup / kLanes;
  typedef int8_t codes __attribute__((vector_size(kLanes)));
  vf v[N], peak = set1(0.f), poison = set1(0.f);
  for (int i = 0; i < N; ++i) {
    v[i] = load(x + i * kLanes);
    peak = max(abs(v[i]), peak);
    poison += v[i] * set1(0.f);  // NaN where x is NaN or infinite
  }
  QuantisedGroup out;
  const float amax = reduce_max(peak), inverse = amax > 0.f ? 127.f / amax : 0.f;
  out.scale = amax / 127.f;
  if (const float bad = reduce_add(poison); bad != bad) {  // the whole group, so that every output of this row shows it
    for (int i = 0; i < N; ++i) v[i] = set1(0.f);
    out.scale = kNan;
  }
  vi sum = vi{};
  for (int i = 0; i < N; ++i) {
    const vi code = to_int(round_even(v[i] * set1(inverse)));
    sum += code;
    store_bits(reinterpret_cast<int8_t*>(out.quads) + i * kLanes, __builtin_convertvector(code, codes));
  }
  out.sum = 0;
  for (int i = 0; i < kLanes; ++i) out.sum += sum[i];
  return out;
}

}  // namespace pk
