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
// chunks then lie in different banks.
template <int Rows, int D, bool kCodes>
struct Chunks {
  static constexpr int kRowsAtOnce = kCodes ? 8 : 4, kAcross = D / 64;
  PK_DEVICE static int row(int i) { return i * kRowsAtOnce + lane() / (kCodes ? 1 : 8) % kRowsAtOnce; }
  PK_DEVICE static int chunk(int c) { return kCodes ? c * 4 + lane() / 8 : c * 8 + lane() % 8; }
  PK_DEVICE static uint32_t place(int i, int c) {
    return kCodes ? static_cast<uint32_t>((i * kAcross + c) * 32 + lane()) * 16 : chunk_at<Rows>(row(i), chunk(c));
  }
  PK_DEVICE static int lane() { return static_cast<int>(threadIdx.x) % 32; }
};

// The warp copies its rows, `bytes` of each, to `to`: its first row in a tile [Rows, D] (a multiple of eight), or its room for codes.
// Rows that are not aligned to 16 bytes are not copied asynchronously.
template <int Rows, int D, bool kCodes, int Count>
PK_DEVICE void fetch_rows(uint32_t to, const char* data, const WarpRows<Count>& rows, int bytes, bool aligned) {
  using At = Chunks<Rows, D, kCodes>;
  if (aligned) {
#pragma unroll
    for (int i = 0; i < Count / At::kRowsAtOnce; i++) {
      const char* from = data + __shfl_sync(kFullWarp, rows.at, At::row(i)) + At::chunk(0) * 16;
#pragma unroll
      for (int c = 0; c < At::kAcross; c++) {
        const bool exists = (rows.exist >> At::row(i) & 1) && At::chunk(c) * 16 < bytes;
        cp_async_16(to + At::place(i, c), from + (At::chunk(c) - At::chunk(0)) * 16, exists);
      }
    }
    return;
  }
#pragma unroll 1
  for (int step = 0; step < Count / At::kRowsAtOnce * At::kAcross; step++) {
    const int i = step / At::kAcross, c = step % At::kAcross;
    const char* from = data + __shfl_sync(kFullWarp, rows.at, At::row(i));
    store_shared_128(to + At::place(i, c), load_bytes(from, At::chunk(c) * 16, rows.exist >> At::row(i) & 1 ? bytes : 0));
  }
}

// The warp widens the codes that it has copied (and waited for) into its rows of a tile of T. `power`: of row lane % Count.
template <class T, int Rows, int D, bool kUnit, int Count>
PK_DEVICE void widen_rows(uint32_t to, uint32_t codes, DType type, uint32_t power) {
  using At = Chunks<Rows, D, true>;
#pragma unroll 1
  for (int i = 0; i < Count / At::kRowsAtOnce; i++) {
    const uint32_t own = kUnit ? power : __shfl_sync(kFullWarp, power, At::row(i));
#pragma unroll
    for (int c = 0; c < At::kAcross; c++) {
      uint32_t pairs[8];
      widen<T, kUnit>(type, load_shared_128(codes + At::place(i, c)), own, pairs);
      store_shared_128(to + chunk_at<Rows>(At::row(i), 2 * At::chunk(c)), {pairs[0], pairs[1], pairs[2], pairs[3]});
      store_shared_128(to + chunk_at<Rows>(At::row(i), 2 * At::chunk(c) + 1), {pairs[4], pairs[5], pairs[6], pairs[7]});
    }
  }
}

// Where the rows of a tile come from, and how they are read.
struct TileSource {
  TokenRows rows;
  Scales scales;
  DType type;    // of what is stored: codes are widened to the tile's type
  int dim;       // columns past it are zero
  bool aligned;  // every row begins on 16 bytes
  PK_DEVICE bool copied() const { return aligned && size_of_stored() == 2; }
  PK_DEVICE int size_of_stored() const { return type == DType::i8 || type == DType::fp8_e4m3 ? 1 : 2; }
};

// Eight elements of a row in the tile's type T, by plain loads: for codes, and for rows that are not aligned.
template <class T>
PK_DEVICE uint4 widened(const TileSource& s, const char* row, int chunk, float scale) {
  uint32_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (s.size_of_stored() == 2) {
      const auto* p = reinterpret_cast<const uint16_t*>(row) + chunk * 8 + 2 * i;
      pair[i] = p[0] | static_cast<uint32_t>(p[1]) << 16;
    } else {
      const auto* p = reinterpret_cast<const uint8_t*>(row) + chunk * 8 + 2 * i;
      pair[i] = pack<T>(decode(s.type, p[0]) * scale, decode(s.type, p[1]) * scale);
    }
  }
  return {pair[0], pair[1], pair[2], pair[3]};
}

// Fills a tile [Rows, D]: `find(row)` gives the slot of a row and `head(row)` its head; rows without a slot are zero.
template <class T, int Rows, int D, class Find, class Head>
PK_DEVICE void load_tile(uint32_t to, const TileSource& s, Find&& find, Head&& head) {
  constexpr int kChunks = D / 8;
  if (s.copied()) {
#pragma unroll 4  // all at once would hold an address for each
    for (int i = 0; i < Rows * kChunks / kThreads; i++) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x), row = index / kChunks, chunk = index % kChunks;
      const Slot slot = find(row);
      const bool valid = slot.exists() && chunk * 8 < s.dim;
      cp_async_16(to + chunk_at<Rows>(row, chunk), valid ? s.rows.row(slot, head(row)) + chunk * 16 : s.rows.data, valid);
    }
    return;
  }
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < Rows * kChunks; index += kThreads) {
    const int row = index / kChunks, chunk = index % kChunks;
    const Slot slot = find(row);
    uint4 v{0, 0, 0, 0};
    if (slot.exists() && chunk * 8 < s.dim) {
      const float scale = s.scales.data ? s.scales.at(slot, head(row)) : 1.f;
      v = widened<T>(s, s.rows.row(slot, head(row)), chunk, scale);
    }
    store_shared_128(to + chunk_at<Rows>(row, chunk), v);
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
