// A block of decode attention: its keys multiplied with the query heads of a group, its values with their weights.
#pragma once

#include "attention.h"
#include "kernels.h"
#include "paged_kv.h"
#include "row_block.h"
#include "shuffle.h"
#include "simd.h"
#include "tile.h"

namespace pk {

inline constexpr int kHeadsAtOnce = 4;  // query heads that share one pass over V in registers

// Sizes of one call. Rows of partial results are padded to 16 floats at every ISA level.
struct Sizes {
  int64_t batch, heads, kv_heads, group, dim, dim_v, dim_pad, acc_pad;

  explicit Sizes(const PagedDecodeParams& p)
      : batch(p.q.size[0]),
        heads(p.q.size[1]),
        kv_heads(p.k_cache.size[2]),
        group(heads / kv_heads),
        dim(p.q.size[2]),
        dim_v(p.v_cache.size[3]),
        dim_pad(padded(dim, kLanes)),
        acc_pad(padded(dim_v, 16)) {}
  int64_t partial_floats() const { return heads * (acc_pad + 2); }
};

// Addresses of one block's K and V rows (of kv head 0). Past the last token they repeat it, to fill a vector of keys.
template <class T>
struct Block {
  int n;
  const T *k[kBlock], *v[kBlock];
  const float *k_scale[kBlock], *v_scale[kBlock];

  void locate(const KvRows<T>& keys, const KvRows<T>& values, Range range) {
    n = int(std::min<int64_t>(kBlock, range.end - range.begin));
    keys.locate(range.begin, range.begin + n, k, k_scale);
    values.locate(range.begin, range.begin + n, v, v_scale);
    for (int t = n; t % kLanes; ++t) k[t] = k[n - 1];
  }
};

// Asks for the lines of a row ahead of its use; they go to L2, since a block does not fit beside its successor in L1.
template <class T>
inline void prefetch_row(const T* row, int64_t dim) {
  const char* p = reinterpret_cast<const char*>(row);
  for (int64_t i = 0; i < dim * int64_t(sizeof(T)); i += 64) __builtin_prefetch(p + i, 0, 2);
}

// The block that follows, of this head or of the unit that the thread takes next: it is fetched while this one is computed.
template <class T>
struct Ahead {
  const Block<T>* block = nullptr;  // null: nothing follows
  int64_t k_offset = 0, v_offset = 0;

  void fetch_key(int t, int64_t dim) const {
    if (block && t < block->n) prefetch_row(block->k[t] + k_offset, dim);
  }
  void fetch_values(int64_t dim) const {
    if (block)
      for (int t = 0; t < block->n; ++t) prefetch_row(block->v[t] + v_offset, dim);
  }
};

// Keys are transposed in 32-bit units of one, two or four elements, which are widened where they are multiplied: lanes are keys.
template <class T>
constexpr int kPerUnit = 4 / int(sizeof(T));
inline void widen(vi unit, vf (&x)[1], float) { x[0] = as_f(unit); }
inline void widen(vi unit, vf (&x)[2], bf16) { widen_pairs(unit, x[0], x[1], bf16{}); }
inline void widen(vi unit, vf (&x)[2], f16) { widen_pairs(unit, x[0], x[1], f16{}); }
inline void widen(vi unit, vf (&x)[4], int8_t) {
  for (int i = 0; i < 4; ++i) x[i] = to_float(vi(vu(unit) << (24 - 8 * i)) >> 24);
}
inline void widen(vi unit, vf (&x)[4], fp8) {
  for (int i = 0; i < 4; ++i) x[i] = fp8_to_float(vu(unit) >> (8 * i) & 0xff);
}

// tile[units][kLanes] of the rows of kLanes keys; units past the end of a row hold anything.
template <class T>
void transpose_keys(const T* const* rows, int64_t offset, int64_t units, uint32_t* tile) {
  for (int64_t u = 0; u < units; u += kLanes) {
    vu part[kLanes];
    for (int t = 0; t < kLanes; ++t) {
      const T* row = rows[t] + offset + u * kPerUnit<T>;
      part[t] = vu{};
      if (units - u >= kLanes)
        part[t] = load_bits<vu>(row);
      else
        std::memcpy(&part[t], row, size_t(units - u) * 4);
    }
    transpose(part);
    for (int t = 0; t < kLanes; ++t) store_bits(tile + (u + t) * kLanes, part[t]);
  }
}

// How a block is multiplied: element by element in float32, or, where bfloat16 meets bfloat16 and the CPU is fast at it, in pairs:
// two elements of a key with two of the query, two keys' values with two weights.
template <class T_, class Step_>
struct Product {
  using T = T_;
  using Step = Step_;
  static constexpr bool kPairs = Step::kWidth == 2;
};

// scores[Heads][kBlock] = q.k for kLanes keys. Summed in chunks: one long chain would lose the last bits of large scores.
template <class T, int Heads>
void score_heads(const uint32_t* tile, int64_t dim, const float* q, int64_t q_stride, float* scores) {
  constexpr int64_t kPer = kPerUnit<T>, kChunk = 32;
  vf total[Heads] = {};
  for (int64_t c = 0; c < dim; c += kChunk) {
    vf sum[Heads][2] = {};
    for (int64_t i = c; i < std::min(dim, c + kChunk); i += std::max<int64_t>(kPer, 2)) {
      for (int64_t j = i; j < i + std::max<int64_t>(kPer, 2); j += kPer) {
        vf x[kPer];
        widen(load_bits<vi>(tile + j / kPer * kLanes), x, T{});
#pragma GCC unroll 4
        for (int e = 0; e < kPer; ++e)
#pragma GCC unroll 4
          for (int h = 0; h < Heads; ++h) {
            vf& chain = sum[h][(j + e) & 1];
            chain = fma(x[e], set1(q[h * q_stride + j + e]), chain);
          }
      }
    }
    for (int h = 0; h < Heads; ++h) total[h] += sum[h][0] + sum[h][1];
  }
  for (int h = 0; h < Heads; ++h) store(scores + h * kBlock, total[h]);
}

// Pairs [unit, unit + kLanes) of a row; 0 past its end.
inline vu row_pairs(const bf16* row, int64_t unit, int64_t units) {
  if (units - unit >= kLanes) return load_bits<vu>(row + 2 * unit);
  vu pairs = {};
  std::memcpy(&pairs, row + 2 * unit, size_t(units - unit) * 4);
  return pairs;
}

// scores[kLanes] = q.k in pairs: a vector of sums per key, and then the lanes of kLanes of them added at once. Vectors: of a row, or
// 0 when only the call knows.
template <int Vectors>
inline vf score_pairs(const bf16* const* rows, int64_t offset, int64_t units, const float* q) {
  vf sum[kLanes];
#pragma GCC unroll 16
  for (int t = 0; t < kLanes; ++t) {
    sum[t] = vf{};
    if constexpr (Vectors > 0) {
#pragma GCC unroll 8
      for (int i = 0; i < Vectors; ++i)
        sum[t] = Bf16Step::multiply_add(sum[t], load_bits<vu>(q + i * kLanes), load_bits<vu>(rows[t] + offset + 2 * i * kLanes));
    } else {
      for (int64_t u = 0; u < units; u += kLanes)
        sum[t] = Bf16Step::multiply_add(sum[t], load_bits<vu>(q + u), row_pairs(rows[t] + offset, u, units));
    }
  }
  return add_rows(sum);
}
inline vf score_pairs(const bf16* const* rows, int64_t offset, int64_t units, const float* q) {
  switch (units) {
    case 32:
      return score_pairs<2>(rows, offset, units, q);
    case 64:
      return score_pairs<4>(rows, offset, units, q);
    case 128:
      return score_pairs<8>(rows, offset, units, q);
    default:
      return score_pairs<0>(rows, offset, units, q);
  }
}
template <class T>
void score_block_pairs(const Block<T>& block, const Ahead<T>& ahead, int64_t offset, const Sizes& z, const float* q, float* scores) {
  for (int first = 0; first < block.n; first += kLanes) {
    for (int t = 0; t < kLanes; ++t) ahead.fetch_key(first + t, z.dim);
    for (int64_t g = 0; g < z.group; ++g)
      store(scores + g * kBlock + first, score_pairs(block.k + first, offset, z.dim / 2, q + g * z.dim_pad));
  }
}

// scores[group][kBlock] = q.k, kLanes keys at a time: their rows are transposed once into `tile` for all heads.
template <class P, class T>
void score_block(const Block<T>& block, const Ahead<T>& ahead, int64_t offset, const Sizes& z, const float* q, float* tile, float* scores) {
  if constexpr (P::kPairs) return score_block_pairs(block, ahead, offset, z, q, scores);
  uint32_t* units = reinterpret_cast<uint32_t*>(tile);
  for (int first = 0; first < block.n; first += kLanes) {
    for (int t = 0; t < kLanes; ++t) ahead.fetch_key(first + t, z.dim);
    transpose_keys(block.k + first, offset, z.dim / kPerUnit<T>, units);
    for (int64_t g = 0; g < z.group; g += kHeadsAtOnce) {
      const float* rows = q + g * z.dim_pad;
      float* s = scores + g * kBlock + first;
      switch (std::min<int64_t>(kHeadsAtOnce, z.group - g)) {
        case 1:
          score_heads<T, 1>(units, z.dim, rows, z.dim_pad, s);
          break;
        case 2:
          score_heads<T, 2>(units, z.dim, rows, z.dim_pad, s);
          break;
        case 3:
          score_heads<T, 3>(units, z.dim, rows, z.dim_pad, s);
          break;
        default:
          score_heads<T, 4>(units, z.dim, rows, z.dim_pad, s);
      }
    }
  }
}

// acc[Heads][x ...] = acc * shrink + weights * V over Vectors vectors of columns (the last `lanes` wide).
template <class T, int Heads, int Vectors>
inline void weigh_columns(const T* const* rows, int64_t offset, int n, int lanes, const float* weights, const float* shrink, float* acc,
                          int64_t acc_stride) {
  vf sum[Heads][Vectors];
#pragma GCC unroll 4
  for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) sum[h][j] = load(acc + h * acc_stride + j * kLanes) * set1(shrink[h]);
  for (int t = 0; t < n; ++t) {
    const T* row = rows[t] + offset;
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) {
      const vf value = Vectors == 1 ? load_n(row, lanes) : load(row + j * kLanes);
#pragma GCC unroll 4
      for (int h = 0; h < Heads; ++h) sum[h][j] = fma(set1(weights[h * kBlock + t]), value, sum[h][j]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) store(acc + h * acc_stride + j * kLanes, sum[h][j]);
}

// The same for pairs of keys, with the weights as bfloat16 at the start of their rows.
template <int Heads, int Vectors>
inline void weigh_column_pairs(const bf16* const* rows, int64_t offset, int n, int lanes, const float* weights, const float* shrink,
                               float* acc, int64_t acc_stride) {
  vf sum[Heads][Vectors];
#pragma GCC unroll 4
  for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) sum[h][j] = load(acc + h * acc_stride + j * kLanes) * set1(shrink[h]);
  for (int t = 0; t < n; t += 2) {
    const bf16 *first = rows[t] + offset, *second = t + 1 < n ? rows[t + 1] + offset : nullptr;
    vu x[Vectors];
    if constexpr (Vectors == 1) {
      x[0] = as_u(load_n(first, lanes)) >> 16;
      if (second) x[0] |= as_u(load_n(second, lanes));
    } else {
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; j += 2)
        interleave_halves(load_bits<vu>(first + j * kLanes), second ? load_bits<vu>(second + j * kLanes) : vu{}, x[j], x[j + 1]);
    }
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      const vu pair = vu{} + float_to_bits(weights[h * kBlock + t / 2]);
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; ++j) sum[h][j] = Bf16Step::multiply_add(sum[h][j], x[j], pair);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) store(acc + h * acc_stride + j * kLanes, sum[h][j]);
}

// Vectors of columns that are accumulated at once: within the registers, enough chains to hide latency.
template <class P, int Heads>
constexpr int kVectors = P::kPairs    ? (Heads == 1 ? 8 : 4)
                         : Heads == 1 ? 8
                         : Heads == 4 ? 2
                                      : 4;
template <class P, int Heads, int Vectors, class T>
inline void weigh_strip_of(const Block<T>& block, int64_t offset, int lanes, const float* weights, const float* shrink, float* acc,
                           int64_t acc_stride) {
  if constexpr (P::kPairs)
    weigh_column_pairs<Heads, Vectors>(block.v, offset, block.n, lanes, weights, shrink, acc, acc_stride);
  else
    weigh_columns<T, Heads, Vectors>(block.v, offset, block.n, lanes, weights, shrink, acc, acc_stride);
}

template <class P, int Heads, class T>
void weigh_heads(const Block<T>& block, const Ahead<T>& ahead, int64_t offset, const Sizes& z, const float* weights, const float* shrink,
                 float* acc) {
  constexpr int kWide = kVectors<P, Heads>;
  ahead.fetch_values(z.dim_v);
  int64_t x = 0;
  for (; x + kWide * kLanes <= z.dim_v; x += kWide * kLanes)
    weigh_strip_of<P, Heads, kWide>(block, offset + x, kLanes, weights, shrink, acc + x, z.acc_pad);
  for (; x < z.dim_v; x += kLanes) weigh_strip_of<P, Heads, 1>(block, offset + x, int(z.dim_v - x), weights, shrink, acc + x, z.acc_pad);
}

// acc[group][acc_pad] = acc * shrink + weights[group][kBlock] * V.
template <class P, class T>
void weigh_block(const Block<T>& block, const Ahead<T>& ahead, int64_t offset, const Sizes& z, const float* weights, const float* shrink,
                 float* acc) {
  for (int64_t g = 0; g < z.group; g += kHeadsAtOnce) {
    const float *w = weights + g * kBlock, *s = shrink + g;
    float* a = acc + g * z.acc_pad;
    const Ahead<T> fetch = g == 0 ? ahead : Ahead<T>{};
    switch (std::min<int64_t>(kHeadsAtOnce, z.group - g)) {
      case 1:
        weigh_heads<P, 1>(block, fetch, offset, z, w, s, a);
        break;
      case 2:
        weigh_heads<P, 2>(block, fetch, offset, z, w, s, a);
        break;
      case 3:
        weigh_heads<P, 3>(block, fetch, offset, z, w, s, a);
        break;
      default:
        weigh_heads<P, 4>(block, fetch, offset, z, w, s, a);
    }
  }
}

}  // namespace pk
