// Shapes to tiles: pure functions of sizes, the reason beside each constant.
#pragma once
#include <algorithm>
#include <cstdint>

namespace pk::cuda {  // constexpr: for kernels too

// Head dims are padded to the next of these with zeros: each is a build of its own.
constexpr int padded_head_dim(int64_t dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

// Query rows of a block of prefill attention, by padded head dim. Two fragments a warp halve its reads of K and V; past 64 columns
// there is no room for their outputs.
constexpr int prefill_rows(int dim) { return dim <= 64 ? 128 : 64; }

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
