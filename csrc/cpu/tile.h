// Matrix tiles of prefill attention: operands packed in 32-bit units, and the register kernel that multiplies them.
//
// A unit is what one lane multiplies in one step: a float, or two neighbouring bfloat16. Packing, panels and loops are the same
// for both; only the step differs.
#pragma once
#include "paged_kv.h"
#include "softmax.h"

namespace pk {

constexpr int kPanel = 6;                            // query rows of a panel
constexpr int kPanelVectors = kLanes == 16 ? 4 : 2;  // 6 x 4 or 6 x 2 accumulators, two or four operands: all registers
constexpr int kStrip = kPanelVectors * kLanes;       // columns of a panel: keys, or elements of V
static_assert(kBlock % kStrip == 0);

// Products of floats.
struct FloatStep {
  static constexpr int kWidth = 1;
  static vf multiply_add(vf sum, vu a, vu b) { return fma(as_f((vi)a), as_f((vi)b), sum); }
};

// Products of pairs of bfloat16, summed in float32. The portable form says what the instruction computes.
struct Bf16Step {
  static constexpr int kWidth = 2;
  static vf multiply_add(vf sum, vu a, vu b) {
#if PK_AVX512
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum = fma(as_f((vi)(a << 16)), as_f((vi)(b << 16)), sum);
    return fma(as_f((vi)(a & 0xffff0000u)), as_f((vi)(b & 0xffff0000u)), sum);
#endif
  }
};

// Units from one row of a packed query to the next: no multiple of a page of memory, so that the rows of a panel do not share sets of L1.
template <class Step>
constexpr int kQueryUnits = kMaxHeadDim / Step::kWidth + kLanes;

// Whether products of pairs pay: AMD issues vdpbf16ps as often as an FMA, Intel half as often, where floats are faster (1.6 times,
// packing included) and more exact. Emulated, to be tested, always.
inline bool pairs_are_fast() {
#if PK_AVX512
  static const bool fast = __builtin_cpu_is("amd");
  return fast;
#else
  return true;
#endif
}

// sum[row][column] += a[row] b[column] over steps. Unit (row, step) of a is at row * RowStride + step * StepStride; b has
// Vectors vectors a step.
template <class Step, int RowStride, int StepStride, int Vectors>
[[gnu::always_inline]] inline void multiply(vf (&sum)[kPanel][Vectors], const uint32_t* a, const uint32_t* b, int64_t steps) {
  for (int64_t k = 0; k < steps; ++k, a += StepStride, b += Vectors * kLanes) {
    vu x[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) x[j] = load_bits<vu>(b + j * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kPanel; ++r) {
      const vu y = vu{} + a[r * RowStride];
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sum[r][j] = Step::multiply_add(sum[r][j], y, x[j]);
    }
  }
}

// scores[kPanel][kBlock] = q.k for one strip of keys. Summed in chunks: one long chain would lose the last bits of large scores.
template <class Step>
inline void score_panel(const uint32_t* query, const uint32_t* keys, int64_t units, float* scores) {
  constexpr int64_t kChunk = 16 * Step::kWidth;
  for (int64_t u = 0; u < units; u += kChunk, query += kChunk, keys += kChunk * kStrip) {
    vf sum[kPanel][kPanelVectors] = {};
    multiply<Step, kQueryUnits<Step>, 1>(sum, query, keys, std::min(kChunk, units - u));
#pragma GCC unroll 6
    for (int r = 0; r < kPanel; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < kPanelVectors; ++j) {
        float* s = scores + r * kBlock + j * kLanes;
        store(s, u == 0 ? sum[r][j] : load(s) + sum[r][j]);
      }
  }
}

// acc[kPanel][columns of one strip] = acc * shrink + weights * V.
template <class Step, int Vectors>
inline void weigh_panel(const uint32_t* weights, const uint32_t* values, int64_t steps, const float* shrink, float* acc,
                        int64_t acc_stride) {
  vf sum[kPanel][Vectors];
#pragma GCC unroll 6
  for (int r = 0; r < kPanel; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) sum[r][j] = load(acc + r * acc_stride + j * kLanes) * set1(shrink[r]);
  multiply<Step, kBlock / Step::kWidth, 1>(sum, weights, values, steps);
#pragma GCC unroll 6
  for (int r = 0; r < kPanel; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) store(acc + r * acc_stride + j * kLanes, sum[r][j]);
}

// The last strip of V may have fewer vectors than the others.
template <class Step>
inline void weigh_strip(int vectors, const uint32_t* weights, const uint32_t* values, int64_t steps, const float* shrink, float* acc,
                        int64_t acc_stride) {
  if constexpr (kPanelVectors == 4) {
    if (vectors == 4) return weigh_panel<Step, 4>(weights, values, steps, shrink, acc, acc_stride);
    if (vectors == 3) return weigh_panel<Step, 3>(weights, values, steps, shrink, acc, acc_stride);
  }
  if (vectors == 2) return weigh_panel<Step, 2>(weights, values, steps, shrink, acc, acc_stride);
  weigh_panel<Step, 1>(weights, values, steps, shrink, acc, acc_stride);
}

// Units [unit, unit + kLanes) of a row of `dim` elements; 0 past its end.
template <class Step, class T>
inline vu row_units(const T* row, int64_t unit, int64_t dim) {
  if constexpr (Step::kWidth == 1) return (vu)load_n(row + unit, int(dim - unit));
  if (dim / 2 - unit >= kLanes) return load_bits<vu>(row + 2 * unit);
  vu units = {};
  std::memcpy(&units, row + 2 * unit, std::min<int64_t>(kLanes, dim / 2 - unit) * sizeof(uint32_t));
  return units;
}

// K of kBlock keys, transposed: strip by strip of keys, [dim units][kStrip keys]. rows[t] == nullptr packs zeros.
template <class Step, class T>
void pack_keys(const T* const* rows, const float* scales, int64_t dim, uint32_t* out) {
  const int64_t units = dim / Step::kWidth;
  for (int first = 0; first < kBlock; first += kLanes)
    for (int64_t u = 0; u < units; u += kLanes) {
      vu tile[kLanes];
      for (int t = 0; t < kLanes; ++t) {
        const T* row = rows[first + t];
        tile[t] = row ? row_units<Step>(row, u, dim) : vu{};
        if constexpr (is_code<T>) tile[t] = (vu)(as_f((vi)tile[t]) * set1(scales[first + t]));
      }
      transpose(tile);
      uint32_t* strip = out + first / kStrip * units * kStrip + u * kStrip + first % kStrip;
      for (int i = 0; i < std::min<int64_t>(kLanes, units - u); ++i) store_bits(strip + i * kStrip, tile[i]);
    }
}

// The largest exponents met: all bits set in one is infinity or NaN. Of floats, or of the halves of units.
struct Exponents {
  vh_pair largest = {};

  void meet(vu x) {
    const vh_pair exponents = (vh_pair)(x & 0x7f807f80u);
    largest = exponents > largest ? exponents : largest;
  }
  void meet(vf x) { meet(as_u(x) & 0x7f800000u); }
  bool finite() const {
    bool all = true;
    for (int i = 0; i < 2 * kLanes; ++i) all &= largest[i] < 0x7f80;
    return all;
  }
};

// V of kBlock keys: strip by strip of columns, [kBlock / width steps][columns]. Returns whether all of it is finite.
template <class Step, class T>
bool pack_values(const T* const* rows, const float* scales, int64_t dim, uint32_t* out) {
  Exponents exponents;
  const int64_t width = padded(dim, kLanes);
  for (int64_t x = 0; x < width; x += kStrip) {
    const int64_t columns = std::min<int64_t>(kStrip, width - x);
    for (int t = 0; t < kBlock; t += Step::kWidth, out += columns) {
      if constexpr (Step::kWidth == 1) {
        for (int64_t j = 0; j < columns; j += kLanes) {
          vf v = rows[t] ? load_n(rows[t] + x + j, int(dim - x - j)) : set1(0.f);
          if constexpr (is_code<T>) v = v * set1(scales[t]);
          exponents.meet(v);
          store(reinterpret_cast<float*>(out + j), v);
        }
      } else {
        for (int64_t j = 0; j < columns; j += 2 * kLanes) {
          const vu a = rows[t] ? row_units<Step>(rows[t], (x + j) / 2, dim) : vu{};
          const vu b = rows[t + 1] ? row_units<Step>(rows[t + 1], (x + j) / 2, dim) : vu{};
          exponents.meet(a), exponents.meet(b);
          vu first, second;
          interleave_halves(a, b, first, second);
          store_bits(out + j, first);
          if (j + kLanes < columns) store_bits(out + j + kLanes, second);
        }
      }
    }
  }
  return exponents.finite();
}

// Zeros a key of packed values.
template <class Step>
void clear_value(uint32_t* values, int64_t dim, int key) {
  const int64_t width = padded(dim, kLanes);
  for (int64_t x = 0; x < width; x += kStrip) {
    const int64_t columns = std::min<int64_t>(kStrip, width - x), step = key / Step::kWidth;
    uint32_t* row = values + x * (kBlock / Step::kWidth) + step * columns;
    const uint32_t keep = Step::kWidth == 1 ? 0u : key % 2 ? 0xffffu : 0xffff0000u;
    for (int64_t j = 0; j < columns; ++j) row[j] &= keep;
  }
}

// A query row of a panel, kQueryUnits long.
template <class Step, class Q>
void pack_query(const Q* row, int64_t dim, uint32_t* out) {
  if constexpr (Step::kWidth == 1)
    for (int64_t i = 0; i < dim; i += kLanes) store(reinterpret_cast<float*>(out + i), load_n(row + i, int(dim - i)));
  else
    std::memcpy(out, row, size_t(dim) * sizeof(Q));
}

// Weights of keys [key, key + kLanes) into a row of them: the left operand of PV.
inline void put_weights(FloatStep, void* row, int64_t key, vf weights) { store(static_cast<float*>(row) + key, weights); }
inline void put_weights(Bf16Step, void* row, int64_t key, vf weights) { store_normal(static_cast<bf16*>(row) + key, weights); }

}  // namespace pk
