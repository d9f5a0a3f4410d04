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

// Codes are multiplied as T, which holds them exactly. real = (code x power) x rest: `power`, a power of two in both halves, is for
// `widen`, `rest` for what the codes are multiplied with. In float16, whose range ends at 2^-24, the product of a small scale and a
// weight of the softmax would vanish, so there the scale's exponent stays with the code; bfloat16 needs no such care.
struct SplitScale {
  uint32_t power;
  float rest;
};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool kWidensFloat8 = true;  // there is an instruction for it
#else
constexpr bool kWidensFloat8 = false;
#endif

template <class T>
PK_DEVICE SplitScale split_scale(DType type, float scale) {
  const bool eight_bits = type == DType::fp8_e4m3, shifted = eight_bits && !kWidensFloat8;
  if (!std::is_same_v<T, __half>) return {shifted ? 0x7b807b80u : 0x3f803f80u, scale};  // 2^120 or 1: see `widen_four`
  const int exponent = static_cast<int>(__float_as_uint(scale) >> 23 & 0xffu) - 127, more = shifted ? 8 : 0;
  const int k = min(max(exponent, -24 - more), (eight_bits ? 15 : 5) - more);  // 2^k and int8's 1152 x 2^k are float16 numbers
  const float power = __uint_as_float(static_cast<uint32_t>(127 + k + more) << 23);
  return {pack<T>(power, power), scale * __uint_as_float(static_cast<uint32_t>(127 - k) << 23)};
}

// Four codes as two pairs of T, times `power`. Of float8, NaN gives a number here.
template <class T>
PK_DEVICE void widen_four(DType type, uint32_t codes, uint32_t power, uint32_t& low, uint32_t& high) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr uint32_t kMinusZero = 0x80008000u;
  if (type == DType::fp8_e4m3) {
    // A code's bits, shifted, are a number 2^8 (float16) or 2^120 (bfloat16) times too small, subnormals included.
    const auto number = [](uint32_t v) { return (v & 0x80008000u) | (v & 0x7f007f00u) >> (kHalf ? 1 : 4); };
    low = multiply_add<T>(number(__byte_perm(codes, 0, 0x1404)), power, kMinusZero);
    high = multiply_add<T>(number(__byte_perm(codes, 0, 0x3424)), power, kMinusZero);
  } else if (kHalf) {
    // 0x6400 + n is the float16 1024 + n, and n is the code plus 128.
    const uint32_t n = codes ^ 0x80808080u, less = multiply_add<T>(power, 0xe480e480u, kMinusZero);  // -1152
    low = multiply_add<T>(__byte_perm(n, 0x64646464u, 0x4140), power, less);
    high = multiply_add<T>(__byte_perm(n, 0x64646464u, 0x4342), power, less);
  } else {
    // 0x4300 + n is the bfloat16 128 + n for n of seven bits; the code's sign makes -256 of -128.
    const auto number = [](uint32_t v) {
      return multiply_add<T>((v & 0x007f007fu) | 0x43004300u, 0x3f803f80u, (v & 0x00800080u) | 0xc300c300u);
    };
    low = number(__byte_perm(codes, 0, 0x4140));
    high = number(__byte_perm(codes, 0, 0x4342));
  }
}

// 16 codes as pairs of T, times `power` (`kUnit`: that of scale 1).
template <class T, bool kUnit>
PK_DEVICE void widen(DType type, uint4 codes, uint32_t power, uint32_t (&pairs)[8]) {
  const uint32_t four[4] = {codes.x, codes.y, codes.z, codes.w};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if (type == DType::fp8_e4m3) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const __half2 pair(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(four[i / 2] >> (16 * (i % 2))), __NV_E4M3));
      if constexpr (std::is_same_v<T, __half>) {
        pairs[i] = kUnit ? bits_of(pair) : multiply_add<T>(bits_of(pair), power, 0x80008000u);
      } else {
        pairs[i] = pack<T>(__low2float(pair), __high2float(pair));
      }
    }
    return;
  }
#endif
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    widen_four<T>(type, four[i], power, pairs[2 * i], pairs[2 * i + 1]);
    found |= (four[i] & 0x7f7f7f7fu) + 0x01010101u;  // bit 7 where a float8 is NaN
  }
  if (type == DType::fp8_e4m3 && (found & 0x80808080u)) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint32_t nan = (four[i / 2] & 0x7f7f7f7fu) + 0x01010101u;
      pairs[i] |= __byte_perm(nan, 0, i % 2 ? 0xbbaa : 0x9988) & 0x7fff7fffu;  // the top bit of each byte, throughout a half
    }
  }
}

}  // namespace pk::device
