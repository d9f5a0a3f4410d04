// Where the bytes of a packed weight lie. pykernels/contract/linear.py has the table that this file spells out.
#pragma once
#include <cstdint>

#include "../common/params.h"

namespace pk {

constexpr int kBlockRows = 16;  // rows that rows16 interleaves
constexpr int kGroup = 32;      // columns that share a scale in the block formats, and in quantised activations

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

constexpr bool is_float_format(WeightFormat f) {
  return f == WeightFormat::float32 || f == WeightFormat::bfloat16 || f == WeightFormat::float16;
}
// One float32 scale per row.
constexpr bool is_channel_format(WeightFormat f) { return f == WeightFormat::int8 || f == WeightFormat::fp8_e4m3; }

// Bytes of k columns of one row, the same in both layouts.
inline int64_t row_bytes(WeightFormat f, int64_t k) {
  switch (f) {
    case WeightFormat::float32:
      return 4 * k;
    case WeightFormat::bfloat16:
    case WeightFormat::float16:
      return 2 * k;
    case WeightFormat::int8:
    case WeightFormat::fp8_e4m3:
      return k + 4;
    case WeightFormat::q4_0:
      return k / kGroup * 18;
    case WeightFormat::q4_1:
      return k / kGroup * 20;
    case WeightFormat::q8_0:
      return k / kGroup * 34;
    case WeightFormat::dense:
      break;
  }
  return 0;
}
inline int64_t row_block_bytes(WeightFormat f, int64_t k) { return kBlockRows * row_bytes(f, k); }

// q8_0 keeps its groups in pairs, so that scales and codes fill whole cache lines.
constexpr int64_t kQ8PairBytes = 1088;
struct Q8Group {
  int64_t scales, codes;  // offsets from the start of the row block
};
inline Q8Group q8_group(int64_t group, int64_t groups) {
  const int64_t base = group / 2 * kQ8PairBytes, odd = group & 1;
  const int64_t scales_bytes = (group | 1) < groups ? 64 : 32;  // an odd last group stands alone
  return {base + 32 * odd, base + scales_bytes + 512 * odd};
}

}  // namespace pk
