// y = x W^T + bias + residual for up to eight tokens, on tensor cores: the tokens are the eight columns of an mma, so that a weight
// is read once for all of them, and a row's bits do not depend on how many share the launch.
//
// A block takes 16 rows; its warps take tiles of their columns in turn and add up at the end. Each warp has a ring of its own, filled
// by cp.async from wherever a row begins. Codes and nibbles become numbers of x's type exactly; scales multiply sums.
//
// Bytes of weights on their way, on an H200: 4.8 TB/s x 0.8 us are 29 KB a multiprocessor. Four blocks, which registers and (bfloat16,
// 48 KB each at eight tokens) shared memory allow, have 4 x 4 warps x 3 stages x 2 KB = 96 KB; q4_0 has 55 KB at one token, and at eight,
// where three blocks fit, 41 KB.
#pragma once
#include "device/weights.cuh"

namespace pk::cuda {

using namespace device;

constexpr int kThreads = 128, kWarps = kThreads / 32, kRows = 16, kTokens = 8, kStages = 4;
constexpr int kBlocks = 4;  // on a multiprocessor at least, as far as registers go

struct FloatRows {
  const void* data = nullptr;
  DType type = DType::f32;
  int64_t row = 0;

  explicit FloatRows(const Tensor& t) : data(t.data), type(t.dtype), row(t.ndim == 2 ? t.stride[0] : 0) {}
  PK_DEVICE float at(int64_t r, int64_t c) const { return data ? load_float(type, data, r * row + c) : 0.f; }
};

struct Linear {
  Weight weight;
  FloatRows x, bias, residual;
  void* out;
  DType out_type;
  int64_t out_row;
  int tokens;
  bool wide;  // rows of x begin on 16-byte boundaries
};

PK_DEVICE void store_result(const Linear& c, int token, int64_t row, float sum) {
  const float scale = c.weight.has_row_scale() ? c.weight.row_scale(row) : 1.f;
  store_float(c.out_type, c.out, token * c.out_row + row, sum * scale + c.bias.at(0, row) + c.residual.at(token, row));
}

// How tiles of a format lie in shared memory. Rows of 2-byte numbers: 32-byte pieces permuted by the row, for 8-byte reads of four
// rows at once. Codes: 16-byte chunks permuted, for 4-byte reads of eight rows. Blocks begin anywhere: rows an odd number of chunks apart.
template <WeightFormat kFormat>
struct TileShape {
  static constexpr bool kBlocks = kFormat == WeightFormat::q4_0 || kFormat == WeightFormat::q4_1 || kFormat == WeightFormat::q8_0;
  static constexpr bool kBytes = kFormat == WeightFormat::int8 || kFormat == WeightFormat::fp8_e4m3;
  static constexpr int kColumns = kBlocks || kBytes ? 128 : 64;
  static constexpr int kStoredBytes = kBlocks ? kColumns / kGroup * block_bytes(kFormat) : kColumns * (kBytes ? 1 : 2);
  static constexpr int kChunks = kBlocks ? (kStoredBytes + 14 + 15) / 16 : kStoredBytes / 16;  // they begin up to 14 bytes into the first
  static constexpr int kRowBytes = 16 * (kBlocks ? kChunks | 1 : kChunks);
  static constexpr int kTokenBytes = kColumns * 2;
  static constexpr int kSteps = kColumns / 16;
  // Instructions of the main loop: ci/cuda_figures.py counts them. q4_1 adds up x, too.
  static constexpr int kProducts = kSteps * (kFormat == WeightFormat::q4_1 ? 2 : 1);

  PK_DEVICE static int weight_chunk(int row, int chunk) { return kBlocks ? chunk : chunk ^ (kBytes ? row & 7 : (row & 3) * 2); }
  PK_DEVICE static int token_chunk(int token, int chunk) { return chunk ^ ((token & 3) * 2); }
  __host__ __device__ static constexpr int stage_bytes(int tokens) { return kRows * kRowBytes + tokens * kTokenBytes; }
  static constexpr size_t shared_bytes(int tokens) { return static_cast<size_t>(kWarps) * kStages * stage_bytes(tokens); }
};
constexpr size_t kSumBytes = kWarps * kRows * kTokens * sizeof(float);

// Bytes that a row of the weight takes.
template <WeightFormat kFormat>
PK_DEVICE int64_t row_bytes(const Weight& w) {
  if constexpr (TileShape<kFormat>::kBlocks) return w.columns / kGroup * block_bytes(kFormat);
  return w.columns * (TileShape<kFormat>::kBytes ? 1 : 2);
}

// One tile of weights and tokens on its way to `to`; what lies past a row's end is zero.
template <WeightFormat kFormat>
PK_DEVICE void fetch_tile(const Linear& c, uint32_t to, int64_t row0, int tile) {
  using Shape = TileShape<kFormat>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t bytes = row_bytes<kFormat>(c.weight), stride = Shape::kBlocks ? bytes : c.weight.row_stride * (Shape::kBytes ? 1 : 2);
  const int64_t begin = int64_t{tile} * Shape::kStoredBytes;
#pragma unroll
  for (int i = lane; i < kRows * Shape::kChunks; i += 32) {
    const int row = i / Shape::kChunks, chunk = i % Shape::kChunks;
    const int64_t start = min(row0 + row, c.weight.rows - 1) * stride, at = (start + begin) / 16 * 16 + chunk * 16;
    const auto left = static_cast<int>(min(max(start + bytes - at, int64_t{0}), int64_t{16}));
    const auto place = static_cast<uint32_t>(row * Shape::kRowBytes + Shape::weight_chunk(row, chunk) * 16);
    cp_async_16_part(to + place, c.weight.data + (left ? at : 0), left);
  }
  constexpr int kTokenChunks = Shape::kTokenBytes / 16;
  const auto* x = static_cast<const char*>(c.x.data);
#pragma unroll 1
  for (int i = lane; i < c.tokens * kTokenChunks; i += 32) {
    const int token = i / kTokenChunks, chunk = i % kTokenChunks;
    const int64_t at = int64_t{tile} * Shape::kTokenBytes + chunk * 16;
    const auto left = static_cast<int>(min(max(c.weight.columns * 2 - at, int64_t{0}), int64_t{16}));
    const auto place = static_cast<uint32_t>(kRows * Shape::kRowBytes + token * Shape::kTokenBytes + Shape::token_chunk(token, chunk) * 16);
    cp_async_16_part(to + place, x + (left ? token * c.x.row * 2 + at : 0), left);
  }
}

// Four bytes of shared memory at an even address.
PK_DEVICE uint32_t load_shared_even(const unsigned char* p) {
  const auto* half = reinterpret_cast<const uint16_t*>(p);
  return half[0] | static_cast<uint32_t>(half[1]) << 16;
}

// Numbers 0 to 127, one a byte, minus `less`, as two pairs of T.
template <class T>
PK_DEVICE uint2 small_numbers(uint32_t four, uint32_t less) {
  constexpr bool kHalf = std::is_same_v<T, __half>;  // 0x6400 + n is the float16 1024 + n, 0x4300 + n the bfloat16 128 + n
  const uint32_t magic = kHalf ? 0x64646464u : 0x43434343u, one = kHalf ? 0x3c003c00u : 0x3f803f80u;
  return {multiply_add<T>(__byte_perm(four, magic, 0x4140), one, less), multiply_add<T>(__byte_perm(four, magic, 0x4342), one, less)};
}

// A lane's four columns 4q.. of step `step` of a row: two pairs of T, without scales. `begin`: where the row's blocks begin.
template <class T, WeightFormat kFormat>
PK_DEVICE uint2 numbers(const unsigned char* tile, int row, int begin, int step) {
  using Shape = TileShape<kFormat>;
  const int q = static_cast<int>(threadIdx.x) % 4;
  const unsigned char* at = tile + row * Shape::kRowBytes;
  if constexpr (kFormat == WeightFormat::dense) {
    return *reinterpret_cast<const uint2*>(at + Shape::weight_chunk(row, 2 * step + q / 2) * 16 + q % 2 * 8);
  } else if constexpr (kFormat == WeightFormat::q4_0 || kFormat == WeightFormat::q4_1) {
    const bool minimum = kFormat == WeightFormat::q4_1, half = std::is_same_v<T, __half>;
    const uint32_t codes = load_shared_even(at + begin + step / 2 * block_bytes(kFormat) + (minimum ? 4 : 2) + 4 * q);
    return small_numbers<T>(codes >> (step % 2 * 4) & 0x0f0f0f0fu,
                            half ? (minimum ? 0xe400e400u : 0xe408e408u) : (minimum ? 0xc300c300u : 0xc308c308u));  // -1024, -128; 8 more
  } else {
    const DType type = kFormat == WeightFormat::fp8_e4m3 ? DType::fp8_e4m3 : DType::i8;
    const uint32_t codes = Shape::kBlocks ? load_shared_even(at + begin + step / 2 * block_bytes(kFormat) + 2 + step % 2 * 16 + 4 * q)
                                          : *reinterpret_cast<const uint32_t*>(at + Shape::weight_chunk(row, step) * 16 + 4 * q);
    uint32_t pairs[8];
    widen<T, true>(type, uint4{codes, 0, 0, 0}, split_scale<T>(type, 1.f).power, pairs);
    return {pairs[0], pairs[1]};
  }
}

// sum += W x of a tile: elements as mma.cuh has them, rows g and g + 8, tokens 2q and 2q + 1.
template <class T, WeightFormat kFormat>
PK_DEVICE void multiply_tile(const Linear& c, const unsigned char* tile, const int (&begin)[2], float (&sum)[4]) {
  using Shape = TileShape<kFormat>;
  const int g = static_cast<int>(threadIdx.x) % 32 / 4, q = static_cast<int>(threadIdx.x) % 4;
  const unsigned char* token = tile + kRows * Shape::kRowBytes + g * Shape::kTokenBytes;
  float part[4] = {}, total[4] = {};  // of a block of columns: products, and x alone
#pragma unroll
  for (int step = 0; step < Shape::kSteps; step++) {
    uint2 x{0, 0};
    if (g < c.tokens) x = *reinterpret_cast<const uint2*>(token + Shape::token_chunk(g, 2 * step + q / 2) * 16 + q % 2 * 8);
    const uint2 upper = numbers<T, kFormat>(tile, g, begin[0], step), lower = numbers<T, kFormat>(tile, g + 8, begin[1], step);
    const uint32_t a[4] = {upper.x, lower.x, upper.y, lower.y};
    mma<T>(Shape::kBlocks ? part : sum, a, x.x, x.y);
    if constexpr (kFormat == WeightFormat::q4_1) {
      const uint32_t one = pack<T>(1.f, 1.f), ones[4] = {one, one, one, one};
      mma<T>(total, ones, x.x, x.y);
    }
    if constexpr (Shape::kBlocks) {
      if (step % 2 == 0) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const unsigned char* block = tile + (g + i / 2 * 8) * Shape::kRowBytes + begin[i / 2] + step / 2 * block_bytes(kFormat);
        sum[i] = __fmaf_rn(half_at(block), part[i], sum[i]);
        if (kFormat == WeightFormat::q4_1) sum[i] = __fmaf_rn(half_at(block + 2), total[i], sum[i]);
        part[i] = total[i] = 0.f;
      }
    }
  }
}

// kFormat: dense for any weight of x's own type.
template <class T, WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads, kBlocks) linear_kernel(const __grid_constant__ Linear c) {
  PK_DYNAMIC_SHARED(smem);
  using Shape = TileShape<kFormat>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row0 = int64_t{blockIdx.x} * kRows;
  const int stage_bytes = Shape::stage_bytes(c.tokens),
            tiles = static_cast<int>((c.weight.columns + Shape::kColumns - 1) / Shape::kColumns);
  unsigned char* ring = smem + warp * kStages * stage_bytes;
  const uint32_t ring_address = shared_address(ring);
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; stage++) {
    const int tile = warp + stage * kWarps;
    if (tile < tiles) fetch_tile<kFormat>(c, ring_address + static_cast<uint32_t>(stage * stage_bytes), row0, tile);
    cp_async_commit();
  }
  float sum[4] = {};
  int stage = 0;
#pragma unroll 1
  for (int tile = warp; tile < tiles; tile += kWarps) {
    const int ahead = tile + (kStages - 1) * kWarps, slot = stage == 0 ? kStages - 1 : stage - 1;
    if (ahead < tiles) fetch_tile<kFormat>(c, ring_address + static_cast<uint32_t>(slot * stage_bytes), row0, ahead);
    cp_async_commit();
    cp_async_wait<kStages - 1>();
    __syncwarp();
    int begin[2] = {};
    if constexpr (Shape::kBlocks) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int64_t row = min(row0 + lane / 4 + 8 * i, c.weight.rows - 1);
        begin[i] = static_cast<int>((row * row_bytes<kFormat>(c.weight) + int64_t{tile} * Shape::kStoredBytes) % 16);
      }
    }
    multiply_tile<T, kFormat>(c, ring + stage * stage_bytes, begin, sum);
    __syncwarp();  // every lane has read what is refilled next
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  __syncthreads();                              // the rings become room for sums
  auto* sums = reinterpret_cast<float*>(smem);  // [warps][tokens][rows]
#pragma unroll
  for (int i = 0; i < 4; i++) sums[(warp * kTokens + lane % 4 * 2 + i % 2) * kRows + lane / 4 + i / 2 * 8] = sum[i];
  __syncthreads();
  const int row = static_cast<int>(threadIdx.x) % kRows, token = static_cast<int>(threadIdx.x) / kRows;
  if (token >= c.tokens || row0 + row >= c.weight.rows) return;
  float y = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; w++) y += sums[(w * kTokens + token) * kRows + row];
  store_result(c, token, row0 + row, y);
}

}  // namespace pk::cuda
