// Codes of a quantised KV cache: real = code x scale. Everything in float32, so that codes are the same bits in every backend.
#pragma once
#include "floats.cuh"

namespace pk::device {

inline bool is_code(DType t) { return t == DType::i8 || t == DType::fp8_e4m3; }
PK_DEVICE float largest_code(DType t) { return t == DType::i8 ? 127.f : 448.f; }

// To the nearest, ties to even, saturated. NaN is 0 in int8, which has none, and stays NaN in float8.
PK_DEVICE uint32_t encode(DType type, float ratio) {
  if (type == DType::i8) {
    if (ratio != ratio) return 0;
    return static_cast<uint32_t>(static_cast<int>(rintf(fminf(fmaxf(ratio, -128.f), 127.f)))) & 0xffu;
  }
  const uint32_t bits = __float_as_uint(ratio), sign = bits >> 24 & 0x80u;
  if (ratio != ratio) return sign | 0x7fu;
  const uint32_t magnitude = __float_as_uint(fminf(fabsf(ratio), 448.f));
  const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  const uint32_t small = __float_as_uint(__uint_as_float(magnitude) + 16384.f) - 0x46800000u;  // steps of 2^-9: the adder rounds
  return sign | (magnitude < 0x3c800000u ? small : normal);
}

PK_DEVICE float decode(DType type, uint32_t code) {
  if (type == DType::i8) return static_cast<float>(static_cast<int8_t>(code));
  // The bits of e4m3, shifted, are a float16 2^8 times too small, subnormals included.
  if ((code & 0x7fu) == 0x7fu) return __uint_as_float(0x7fc00000u);
  const auto half_bits = static_cast<unsigned short>((code & 0x7fu) << 7 | (code & 0x80u) << 8);
  return __half2float(__ushort_as_half(half_bits)) * 256.f;
}

}  // namespace pk::device
