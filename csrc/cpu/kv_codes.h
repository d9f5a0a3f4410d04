// Rows of a KV cache: a head's vector to the cache's element type and back. real = stored x scale.
#pragma once
#include "simd.h"

namespace pk {

template <class C>
constexpr bool is_code = false;
template <>
constexpr bool is_code<int8_t> = true;
template <>
constexpr bool is_code<fp8> = true;

template <class C>
constexpr float kLargestCode = 0.f;
template <>
constexpr float kLargestCode<int8_t> = 127.f;
template <>
constexpr float kLargestCode<fp8> = 448.f;

// x / scale to codes: nearest, ties to even, saturated. NaN is 0 in int8 (which has none) and NaN in float8.
template <class C>
vb encode(vf ratio);
template <>
inline vb encode<int8_t>(vf ratio) {
  const vf clamped = min(max(select(ratio == ratio, ratio, set1(0.f)), set1(-128.f)), set1(127.f));
  return low_bytes(vu(to_int(round_even(clamped))));
}
template <>
inline vb encode<fp8>(vf ratio) {
  const vu sign = as_u(ratio) >> 24 & 0x80;
  const vf a = min(abs(ratio), set1(448.f));  // NaN becomes 448 here and is put back below
  const vu bits = as_u(a);
  const vu normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  const vu small = as_u(a + set1(16384.f)) - 0x46800000;  // codes below 2^-6 are steps of 2^-9: the adder rounds to one
  const vu code = (vi)(a < set1(0x1p-6f)) ? small : normal;
  return low_bytes(((vi)(ratio != ratio) ? vu{} + 0x7f : code) | sign);
}

// The largest magnitude of a row; NaN when the row holds one.
template <class X>
float largest(const X* x, int64_t n) {
  vf top = set1(0.f), odd = set1(0.f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const vf v = abs(load_n(x + i, int(n - i)));
    top = max(v, top);
    odd += v * set1(0.f);  // NaN once v is; inf x 0 is NaN too, so ask again below
  }
  if (reduce_add(odd) == 0.f) return reduce_max(top);
  float most = 0.f;
  for (int64_t i = 0; i < n; ++i) {
    const float v = std::fabs(to_float(x[i]));
    if (v != v) return v;
    most = v > most ? v : most;
  }
  return most;
}

// The scale of a row that is quantised on its own: 1 for a row of zeros, so that nothing is divided by zero.
template <class C, class X>
float dynamic_scale(const X* x, int64_t n) {
  const float scale = largest(x, n) / kLargestCode<C>;
  return scale == 0.f ? 1.f : scale;
}

template <class X, class C>
void encode_row(const X* x, C* codes, int64_t n, float scale) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int lanes = n - i < kLanes ? int(n - i) : kLanes;
    const vb c = encode<C>(load_n(x + i, lanes) / set1(scale));
    std::memcpy(codes + i, &c, lanes);
  }
}

template <class X, class O>
void convert_row(const X* x, O* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store_n(out + i, load_n(x + i, int(n - i)), int(n - i));
}

template <class C, class O>
void decode_row(const C* codes, O* out, int64_t n, float scale) {
  for (int64_t i = 0; i < n; i += kLanes) store_n(out + i, load_n(codes + i, int(n - i)) * set1(scale), int(n - i));
}

}  // namespace pk
