// y = x W^T + bias + residual over a dense or packed weight.
//
// Tokens are cut into tiles of nearly equal width; activations are laid out (and quantised) once per call, tile by tile;
// then every thread takes a contiguous range of row blocks and runs all tiles over each while it is in cache. Decode reads
// the weights once at the speed of memory, a small batch too, and prefill is a matrix product by the same kernels.
#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "dense_tiles.h"
#include "dispatch.h"
#include "kernels.h"
#include "linear_epilogue.h"
#include "quantize.h"
#include "threads.h"
#include "tile_kernels.h"

namespace pk {
namespace {

// Multiply-adds below which waking the team costs more than the work.
constexpr int64_t kSmallWork = 1 << 17;
// Up to here every thread prepares the activations for itself, which is cheaper than a barrier.
constexpr int64_t kRedundantTokens = 2;
// Row blocks that a thread takes at a time, in multiply-adds: some microseconds of work.
constexpr int64_t kGrainWork = 1 << 18;
// Bytes of prepared activations per pass over the weights: they should stay in the last-level cache.
constexpr int64_t kPassBytes = 8 << 20;

enum class Prepare { floats, pairs, codes };

// How one call is computed.
struct Method {
  Prepare prepare;
  int width;            // tokens per tile at most
  int64_t token_bytes;  // of one token in a prepared tile
  const TileKernels* kernels;
  int columns = 1;  // of a prepared tile that a token takes: two when its codes have 16 bits
};

Method choose(const LinearParams& p) {
  const int64_t k = p.x.size[1];
  if (p.activations != Activations::as_float) {
    const TileKernels* dots = dot_kernels(p.format);
    if (!dots) fail("linear: quantised activations need a weight of format int8, q4_0, q4_1 or q8_0");
    const int columns = p.activations == Activations::as_int16 ? 2 : 1;
    return {Prepare::codes, kDotWidth / columns, columns * (k / kGroup * kGroupBytes), dots, columns};
  }
  if (p.format == WeightFormat::bfloat16 && p.x.dtype == DType::bf16 && pair_kernels())
    return {Prepare::pairs, kFloatWidth, round_up(k, 2) * 2, pair_kernels()};
  return {Prepare::floats, kFloatWidth, k * 4, &float_kernels(p.format)};
}

// Tokens [first, first + count) of a pass, in tiles of nearly equal width.
struct Tiles {
  int64_t first, count, tiles;

  Tiles(int64_t first, int64_t count, int width) : first(first), count(count), tiles((count + width - 1) / width) {}
  int64_t start(int64_t tile) const { return count * tile / tiles; }  // from `first`
  int width(int64_t tile) const { return int(start(tile + 1) - start(tile)); }
};

// ---- laying out activations ------------------------------------------------------------------------------------
template <class T>
void prepare_floats(const Tensor& x, int64_t token, int width, uint8_t* tile) {
  float* to = reinterpret_cast<float*>(tile);
  for (int t = 0; t < width; ++t) {
    const T* row = x.as<T>() + (token + t) * x.stride[0];
    for (int64_t c = 0; c < x.size[1]; ++c) to[c * width + t] = to_float(row[c]);
  }
}

void prepare_pairs(const Tensor& x, int64_t token, int width, uint8_t* tile) {
  const int64_t k = x.size[1];
  for (int t = 0; t < width; ++t) {
    const bf16* row = x.as<bf16>() + (token + t) * x.stride[0];
    for (int64_t c = 0; c < k; c += 2) {
      const bf16 pair[2] = {row[c], c + 1 < k ? row[c + 1] : bf16{0}};
      std::memcpy(tile + (c / 2 * width + t) * 4, pair, 4);
    }
  }
}

// One group as column t of `width` in its part of a tile.
void put_group(const QuantisedGroup& q, WeightFormat format, int width, int t, uint8_t* to) {
  for (int j = 0; j < kGroup / 4; ++j) store_bits(to + 4 * (j * width + t), q.quads[j]);
  store_bits(to + 32 * width + 4 * t, q.scale);
  if (format == WeightFormat::q4_1)
    store_bits(to + 36 * width + 4 * t, q.scale * float(q.sum));
  else
    store_bits(to + 36 * width + 4 * t, -weight_offset(format) * q.sum);
}

template <class T>
void prepare_codes(const Tensor& x, WeightFormat format, int64_t token, int width, int columns, uint8_t* tile) {
  const int whole = width * columns;
  for (int t = 0; t < width; ++t) {
    const T* row = x.as<T>() + (token + t) * x.stride[0];
    for (int64_t g = 0; g < x.size[1] / kGroup; ++g) {
      uint8_t* to = tile + g * kGroupBytes * whole;
      if (columns == 1) {
        put_group(quantise_group(row + g * kGroup), format, whole, t, to);
        continue;
      }
      const SplitGroup q = quantise_group_16(row + g * kGroup);
      put_group(q.high, format, whole, 2 * t, to);
      put_group(q.low, format, whole, 2 * t + 1, to);
    }
  }
}

void prepare(const LinearParams& p, const Method& m, const Tiles& tiles, int64_t begin, int64_t end, uint8_t* prepared) {
  visit_float(p.x.dtype, [&]<class T>() {
    for (int64_t i = begin; i < end; ++i) {
      uint8_t* tile = prepared + tiles.start(i) * m.token_bytes;
      const int64_t token = tiles.first + tiles.start(i);
      if (m.prepare == Prepare::codes)
        prepare_codes<T>(p.x, p.format, token, tiles.width(i), m.columns, tile);
      else if (m.prepare == Prepare::pairs)
        prepare_pairs(p.x, token, tiles.width(i), tile);
      else
        prepare_floats<T>(p.x, token, tiles.width(i), tile);
    }
  });
}

// out[t] = out[2 t] + out[2 t + 1]: the two halves of 16-bit codes.
void add_pairs(float* out, int width) {
  for (int t = 0; t < width; ++t)
    for (int i = 0; i < kBlockRows; i += kLanes) {
      const float* pair = out + 2 * t * kBlockRows + i;
      store(out + t * kBlockRows + i, load(pair) + load(pair + kBlockRows));
    }
}

// ---- row blocks x tiles ----------------------------------------------------------------------------------------
void multiply(const LinearParams& p, const Method& m, const Tiles& tiles, int64_t begin, int64_t end, const uint8_t* prepared) {
  const int64_t k = p.x.size[1], block_bytes = row_block_bytes(p.format, k);
  const Epilogue epilogue(p);
  alignas(64) float out[kMaxWidth * kBlockRows];
  for (int64_t b = begin; b < end; ++b)
    for (int64_t i = 0; i < tiles.tiles; ++i) {
      const int width = tiles.width(i);
      (*m.kernels)[width * m.columns - 1](p.weight.as<uint8_t>() + b * block_bytes, k, prepared + tiles.start(i) * m.token_bytes, out);
      if (m.columns == 2) add_pairs(out, width);
      epilogue.write(out, tiles.first + tiles.start(i), width, b * kBlockRows);
    }
}

void linear_packed(const LinearParams& p) {
  const int64_t tokens = p.x.size[0], blocks = round_up(p.out.size[1], kBlockRows) / kBlockRows;
  const Method m = choose(p);
  const int64_t pass = std::max<int64_t>(m.width, kPassBytes / std::max<int64_t>(m.token_bytes, 1) / m.width * m.width);
  const bool small = tokens * p.x.size[1] * p.out.size[1] <= kSmallWork;
  static thread_local Scratch shared_scratch;
  uint8_t* shared = tokens > kRedundantTokens ? shared_scratch.get<uint8_t>(std::min(tokens, pass) * m.token_bytes) : nullptr;

  const int64_t grain = std::max<int64_t>(1, kGrainWork / (std::min(tokens, pass) * p.x.size[1] * kBlockRows));
  Shares& shares = team().shares();

  auto work = [&](int tid, int threads) {
    static thread_local Scratch own_scratch;
    uint8_t* prepared = shared ? shared : own_scratch.get<uint8_t>(tokens * m.token_bytes);
    for (int64_t first = 0; first < tokens; first += pass) {
      const Tiles tiles(first, std::min(pass, tokens - first), m.width);
      if (!shared || threads == 1) {
        prepare(p, m, tiles, 0, tiles.tiles, prepared);
      } else {
        if (first > 0) {
          team().barrier();  // the pass before has been read
          shares.reset(tid, blocks);
        }
        prepare(p, m, tiles, tiles.tiles * tid / threads, tiles.tiles * (tid + 1) / threads, prepared);
        team().barrier();
      }
      if (threads == 1)
        multiply(p, m, tiles, 0, blocks, prepared);
      else
        shares.take(tid, grain, [&](int64_t begin, int64_t end) { multiply(p, m, tiles, begin, end, prepared); });
    }
  };
  if (small || team().size() == 1) {
    team().parallel_for(1, 1, [&](int64_t, int64_t, int) { work(0, 1); });
    return;
  }
  team().run([&](int tid) { work(tid, team().size()); }, shared ? Team::Start::together : Team::Start::apart, blocks);
}

// ---- dense weights ---------------------------------------------------------------------------------------------
// x as float32 rows: as it is, or widened into scratch.
struct FloatRows {
  const float* data;
  int64_t stride;
};

template <class T>
void widen_rows(const T* from, int64_t stride, int64_t rows, int64_t k, float* to) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < k; c += kLanes) store_n(to + r * k + c, load_n(from + r * stride + c, int(k - c)), int(k - c));
}

template <class T>
using DenseKernel = void (*)(DenseTile<T>, int, float*);
template <class T, int... I>
constexpr std::array<DenseKernel<T>, kDenseWidth> dense_widths(std::integer_sequence<int, I...>) {
  return {dense_block<T, I + 1>...};
}

// All tokens times weight rows [row, row + rows) that start at w.
template <class T>
void dense_tokens(const LinearParams& p, FloatRows x, const T* w, int64_t stride, int64_t row, int rows) {
  static constexpr auto kernels = dense_widths<T>(std::make_integer_sequence<int, kDenseWidth>{});
  const Epilogue epilogue(p);
  const Tiles tiles(0, p.x.size[0], kDenseWidth);
  alignas(64) float out[kDenseWidth * kBlockRows] = {};
  for (int64_t i = 0; i < tiles.tiles; ++i) {
    const int64_t start = tiles.start(i);
    kernels[tiles.width(i) - 1]({w, stride, x.data + start * x.stride, x.stride, p.x.size[1]}, rows, out);
    epilogue.write(out, start, tiles.width(i), row);
  }
}

template <class T>
void dense_rows(const LinearParams& p, FloatRows x, int64_t begin, int64_t end) {
  const int64_t k = p.x.size[1], stride = p.weight.stride[0];
  const bool widen = !std::is_same_v<T, float> && p.x.size[0] > kDenseWidth;  // once for all tiles: the same bits
  static thread_local Scratch scratch;
  float* wide = widen ? scratch.get<float>(kBlockRows * k) : nullptr;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t row = b * kBlockRows;
    const int rows = int(std::min<int64_t>(kBlockRows, p.out.size[1] - row));
    const T* w = p.weight.as<T>() + row * stride;
    if (!widen) {
      dense_tokens<T>(p, x, w, stride, row, rows);
      continue;
    }
    widen_rows(w, stride, rows, k, wide);
    dense_tokens<float>(p, x, wide, k, row, rows);
  }
}

void linear_dense(const LinearParams& p) {
  const int64_t tokens = p.x.size[0], k = p.x.size[1], blocks = round_up(p.out.size[1], kBlockRows) / kBlockRows;
  static thread_local Scratch scratch;
  FloatRows x{p.x.as<float>(), p.x.stride[0]};
  float* widened = p.x.dtype == DType::f32 ? nullptr : scratch.get<float>(tokens * k);
  if (widened) {
    x = {widened, k};
    visit_float(p.x.dtype, [&]<class T>() {
      team().parallel_for(tokens, kSmallWork / std::max<int64_t>(k, 1), [&](int64_t begin, int64_t end, int) {
        widen_rows(p.x.as<T>() + begin * p.x.stride[0], p.x.stride[0], end - begin, k, widened + begin * k);
      });
    });
  }
  const int64_t grain = tokens * k * p.out.size[1] <= kSmallWork ? blocks : 1;
  visit_float(p.weight.dtype, [&]<class T>() {
    team().parallel_for(blocks, grain, [&](int64_t begin, int64_t end, int) { dense_rows<T>(p, x, begin, end); });
  });
}

}  // namespace

void linear(const LinearParams& p) {
  if (p.x.size[0] == 0 || p.out.size[1] == 0) return;
  if (p.format == WeightFormat::dense) return linear_dense(p);
  if (p.layout != WeightLayout::rows16) fail("linear: a packed weight must have layout rows16");
  linear_packed(p);
}

}  // namespace pk
