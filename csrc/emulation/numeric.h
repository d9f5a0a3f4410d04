// Stored element types to float, by table or by bits. Exact: every float16, bfloat16 and float8 value is a float.
#pragma once
#include <cstdint>
#include <cstring>

#include "device.h"

namespace emu {

inline float float_of_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

const float* half_table();  // [65536]
const float* e4m3_table();  // [256]
const float* e5m2_table();  // [256]

inline float widen16(uint16_t bits, Element type) {
  return type == Element::bf16 ? float_of_bits(static_cast<uint32_t>(bits) << 16) : half_table()[bits];
}

// d[m][n] = a[m][k] * b[k][n], products summed in order of k. No contraction: the same bits on every machine.
void multiply(float* d, const float* a, const float* b, int m, int n, int k);

}  // namespace emu
