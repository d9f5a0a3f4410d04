#include "numeric.h"

#include <cmath>
#include <vector>

namespace emu {
namespace {

// A small binary float: sign, `exponent_bits`, `mantissa_bits`, IEEE-like with subnormals.
float decode(uint32_t bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const uint32_t exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
  const bool negative = bits >> (mantissa_bits + exponent_bits) & 1;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const bool top = exponent == (1u << exponent_bits) - 1;
  float value;
  if (top && has_infinity) {
    value = mantissa ? NAN : INFINITY;
  } else if (top && mantissa == (1u << mantissa_bits) - 1) {
    value = NAN;  // e4m3: one NaN per sign, no infinity
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(static_cast<float>(mantissa | 1u << mantissa_bits), static_cast<int>(exponent) - bias - mantissa_bits);
  }
  return negative ? -value : value;
}

std::vector<float> table(int codes, int exponent_bits, int mantissa_bits, bool has_infinity) {
  std::vector<float> out(codes);
  for (int i = 0; i < codes; i++) out[i] = decode(static_cast<uint32_t>(i), exponent_bits, mantissa_bits, has_infinity);
  return out;
}

}  // namespace

const float* half_table() {
  static const std::vector<float> t = table(65536, 5, 10, true);
  return t.data();
}
const float* e4m3_table() {
  static const std::vector<float> t = table(256, 4, 3, false);
  return t.data();
}
const float* e5m2_table() {
  static const std::vector<float> t = table(256, 5, 2, true);
  return t.data();
}

#if defined(__x86_64__)
__attribute__((target_clones("avx2", "default")))
#endif
void multiply(float* __restrict d, const float* __restrict a, const float* __restrict b, int m, int n, int k) {
  for (int i = 0; i < m; i++) {
    float* row = d + static_cast<long>(i) * n;
    for (int j = 0; j < n; j++) row[j] = 0.f;
    for (int p = 0; p < k; p++) {
      const float x = a[static_cast<long>(i) * k + p];
      const float* y = b + static_cast<long>(p) * n;
      for (int j = 0; j < n; j++) row[j] += x * y[j];
    }
  }
}

}  // namespace emu
