// Tiles of 16-bit rows in shared memory, as ldmatrix reads them without bank conflicts: panels of 64 columns (128 bytes a
// row) side by side, the 16-byte chunks of a row permuted by its number.
#pragma once
#include "paged_kv.cuh"
#include "quant.cuh"

namespace pk::device {

constexpr int kWarps = 4, kThreads = 32 * kWarps;

template <int Rows>
PK_DEVICE uint32_t chunk_at(int row, int chunk) {
  return static_cast<uint32_t>((chunk / 8 * Rows + row) * 128 + ((chunk % 8 ^ (row & 7)) << 4));
}

// From the address of chunk 0 or 1 of a row, the one `rows` (a multiple of eight) and `chunks` (of two) further. The tile begins on
// 128 bytes, so that the permutation is one exclusive or: a register and no more for all that a lane reads of a tile.
template <int Rows>
PK_DEVICE uint32_t further(uint32_t at, int rows, int chunks) {
  return (at ^ static_cast<uint32_t>(chunks % 8 << 4)) + static_cast<uint32_t>((chunks / 8 * Rows + rows) * 128);
}

// Rows of a tile that one warp brings. Each lane knows the row lane % Count, so that where a token lies is worked out once a row.
template <int Count>
struct WarpRows {
  int64_t at;      // where the lane's row begins, in bytes from the source's data
  uint32_t exist;  // bit r: row r is there; otherwise it is zeros and nothing is read

  PK_DEVICE WarpRows(bool exists, int64_t begins) : at(begins), exist(__ballot_sync(kFullWarp, exists)) {}
};

// 16 bytes of a row of `bytes`, zeros past its end, for rows that begin anywhere.
PK_DEVICE uint4 load_bytes(const char* row, int at, int bytes) {
  uint32_t word[4] = {};
#pragma unroll
  for (int i = 0; i < 16; i++) {
    if (at + i < bytes) word[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(row[at + i])) << (8 * (i % 4));
  }
  return {word[0], word[1], word[2], word[3]};
}

// Where a warp puts 16-byte chunks that it copies. 16-bit numbers: where ldmatrix reads them, four rows of a panel at a time.
// Codes: in the order of steps and lanes, since the lane that copies a chunk also widens it; eight rows at a time, whose widened
// chunks then lie in different banks. All follows from the lane, which is hidden from the compiler: it would keep each place in a
// register throughout the main loop.
template <int Rows, int D, bool kCodes>
struct Chunks {
  static constexpr int kRowsAtOnce = kCodes ? 8 : 4, kAcross = D / 64, kChunksAtOnce = kCodes ? 4 : 8;
  int lane = hidden(static_cast<int>(threadIdx.x) % 32);

  PK_DEVICE int row(int i) const { return i * kRowsAtOnce + (kCodes ? lane % 8 : lane / 8); }
  PK_DEVICE int chunk(int c) const { return c * kChunksAtOnce + (kCodes ? lane / 8 : lane % 8); }
  PK_DEVICE uint32_t place(uint32_t to, int i, int c) const {
    if (kCodes) return to + static_cast<uint32_t>(((i * kAcross + c) * 32 + lane) * 16);
    return ((to + chunk_at<Rows>(lane / 8, lane % 8)) ^ i % 2 * 64) + static_cast<uint32_t>((i * kRowsAtOnce + c * Rows) * 128);
  }
  // Of a code's chunk: where its `half`th eight lie widened.
  PK_DEVICE uint32_t widened(uint32_t to, int i, int c, int half) const {
    return ((to + chunk_at<Rows>(lane % 8, lane / 8 * 2)) ^ half * 16) + static_cast<uint32_t>((i * kRowsAtOnce + c * Rows) * 128);
  }
};

// The warp copies its rows, `bytes` of each, to `to`: its first row in a tile [Rows, D] (a multiple of eight), or its room for codes.
// Rows that are not aligned to 16 bytes are not copied asynchronously.
template <int Rows, int D, bool kCodes, int Count>
PK_DEVICE void fetch_rows(uint32_t to, const char* data, const WarpRows<Count>& rows, int bytes, bool aligned) {
  using At = Chunks<Rows, D, kCodes>;
  const At own;
  const uint32_t exist = rows.exist >> own.row(0);
  if (aligned) {
    const char* base = data + own.chunk(0) * 16;
#pragma unroll
    for (int i = 0; i < Count / At::kRowsAtOnce; i++) {
      const char* from = base + __shfl_sync(kFullWarp, rows.at, own.row(i));
#pragma unroll
      for (int c = 0; c < At::kAcross; c++) {
        const bool exists = (exist >> i * At::kRowsAtOnce & 1) && own.chunk(c) * 16 < bytes;
        cp_async_16(own.place(to, i, c), from + c * At::kChunksAtOnce * 16, exists);
      }
    }
    return;
  }
#pragma unroll 1
  for (int step = 0; step < Count / At::kRowsAtOnce * At::kAcross; step++) {
    const int i = step / At::kAcross, c = step % At::kAcross;
    const char* from = data + __shfl_sync(kFullWarp, rows.at, own.row(i));
    store_shared_128(own.place(to, i, c), load_bytes(from, own.chunk(c) * 16, exist >> i * At::kRowsAtOnce & 1 ? bytes : 0));
  }
}

// The warp widens the codes that it has copied (and waited for) into its rows of a tile of T. `power`: of row lane % Count.
template <class T, int Rows, int D, bool kUnit, int Count>
PK_DEVICE void widen_rows(uint32_t to, uint32_t codes, DType type, uint32_t power) {
  using At = Chunks<Rows, D, true>;
  const At own;
#pragma unroll 1
  for (int i = 0; i < Count / At::kRowsAtOnce; i++) {
    const uint32_t factor = kUnit ? power : __shfl_sync(kFullWarp, power, own.row(i));
#pragma unroll
    for (int c = 0; c < At::kAcross; c++) {
      uint32_t pairs[8];
      widen<T, kUnit>(type, load_shared_128(own.place(codes, i, c)), factor, pairs);
      store_shared_128(own.widened(to, i, c, 0), {pairs[0], pairs[1], pairs[2], pairs[3]});
      store_shared_128(own.widened(to, i, c, 1), {pairs[4], pairs[5], pairs[6], pairs[7]});
    }
  }
}

// Bits at 0x8000 of each half where the number is not finite.
template <class T>
PK_DEVICE uint32_t not_finite(uint32_t pair) {
  return ((pair & 0x7fff7fffu) + (std::is_same_v<T, __half> ? 0x04000400u : 0x00800080u)) & 0x80008000u;
}

// Zeroes the infinities and NaN of a tile, each thread in its share; whether there were any in it.
template <class T, int Rows, int D>
PK_DEVICE bool remove_special(uint32_t tile) {
  uint32_t found = 0;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < Rows * D / 8; i += kThreads) {
    const uint4 v = load_shared_128(tile + i * 16);
    uint32_t pair[4] = {v.x, v.y, v.z, v.w}, here = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint32_t bad = not_finite<T>(pair[j]);
      here |= bad;
      pair[j] &= ~((bad >> 15) * 0xffffu);
    }
    if (here) store_shared_128(tile + i * 16, {pair[0], pair[1], pair[2], pair[3]});
    found |= here;
  }
  return found != 0;
}

}  // namespace pk::device
