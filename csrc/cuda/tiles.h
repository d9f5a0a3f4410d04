// Shapes to tiles: pure functions of sizes, the reason beside each constant.
#pragma once
#include <algorithm>
#include <cstdint>

namespace pk::cuda {  // constexpr: for kernels too

// Head dims are padded to the next of these with zeros: each is a build of its own.
constexpr int padded_head_dim(int64_t dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

// Query rows of a block of prefill attention of four warps, by padded head dim. 32 rows a warp halve its reads of K and V; at 256
// columns the outputs of 16 fill half of the registers.
constexpr int prefill_rows(int dim) { return dim <= 128 ? 128 : 64; }
// Keys of a tile: scores of more do not fit beside such outputs.
constexpr int prefill_keys(int dim) { return dim <= 128 ? 64 : 32; }
// Tiles of K and V in shared memory, one in use and the others on their way. A block has 41 KiB at 64 columns: two of them, as many as
// registers allow, on every multiprocessor. At more it has 81 KiB, the most of which two fit where there are 164 KiB or more (1 KiB of
// each is the system's); sm_86, 89 and 120, which have 100, take one: a second would need tiles of 64 rows and 32 keys, which read K
// and V twice as often for a product.
constexpr int prefill_stages(bool codes) { return codes ? 2 : 3; }
// Bytes of shared memory of a block, in the order of prefill.cuh.
constexpr int64_t prefill_shared_bytes(int dim, bool codes) {
  const int64_t rows = prefill_rows(dim), keys = prefill_keys(dim), tile = keys * dim * 2;
  return rows * dim * 2 + prefill_stages(codes) * (codes ? tile / 2 : tile) + (codes ? 2 * tile + 2 * keys * 4 : 0) + rows * 4;
}

// Prefill attention on sm_90a. Rows of a block, 64 to each consumer warpgroup: with 128 columns, scores, output and weights take
// 160 registers of a thread, so that two warpgroups fit; with 64 they take 128 and three fit, which read K and V once for more rows.
constexpr int prefill_sm90_rows(int dim) { return dim <= 64 ? 192 : 128; }
// The most keys whose scores fit beside output and weights, and the widest box of a tensor map that is a whole number of pages.
constexpr int kPrefillSm90Keys = 128;
// Buffers for K and for V: as many as fit beside the queries, up to one for each warpgroup.
constexpr int prefill_sm90_stages(int dim) { return dim <= 64 ? 3 : 2; }
// Tokens of a page that one copy moves: a power of two, so that copies fill the key tile. Below 8 the swizzle cannot be kept.
constexpr int prefill_sm90_box(int64_t page_size) {
  int64_t box = 1;
  while (box < kPrefillSm90Keys && page_size % (2 * box) == 0) box *= 2;
  return static_cast<int>(box);
}
// Pairs of sequence and kv head whose 16-bit keys and values fit in half of the second-level cache (50 MiB on sm_90).
constexpr int64_t cached_heads(int64_t keys, int dim) {
  return std::max<int64_t>(1, (int64_t{24} << 20) / std::max<int64_t>(1, keys * dim * 2 * 2));
}

// Which kernel serves a problem. Lengths and batch have no say: a request's bits must not depend on them.
struct PrefillProblem {
  int capability;  // 10 x major + minor
  int64_t dim, dim_v, group;
  int64_t page_size;  // 0: ragged
  bool codes;         // keys and values of 8 bits
  bool aligned;       // q, k and v begin, and have strides, on 16 bytes
  bool empty;         // there are no keys, hence no tensor to map
};
constexpr bool prefill_on_wgmma(const PrefillProblem& p) {
  const int64_t dim = std::max(p.dim, p.dim_v);
  return p.capability == 90 && dim <= 128 && p.group <= prefill_sm90_rows(padded_head_dim(dim)) &&
         (p.page_size == 0 || prefill_sm90_box(p.page_size) >= 8) && !p.codes && p.aligned && !p.empty;
}

// Keys of a split of decode attention, from a sequence's own length alone, so that its bits do not depend on the batch.
// 256: below it the merge costs as much as it saves. At most 64 splits: a block each for every multiprocessor at 8 kv heads.
constexpr int64_t kMinSplit = 256, kMaxSplits = 64;
constexpr int64_t split_keys(int64_t requested, int64_t keys) {
  if (requested > 0) return requested;
  return std::max(kMinSplit, (keys + kMaxSplits - 1) / kMaxSplits);
}
// The most splits that any sequence of up to `max_keys` has: the grid, which must not depend on lengths.
inline int64_t most_splits(int64_t requested, int64_t max_keys) {
  const int64_t size = requested > 0 ? requested : kMinSplit, splits = (max_keys + size - 1) / size;
  return std::max<int64_t>(1, requested > 0 ? splits : std::min(kMaxSplits, splits));
}

}  // namespace pk::cuda
