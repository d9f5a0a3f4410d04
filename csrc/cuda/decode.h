// Decode attention's arguments, what its splits leave, and the function that launches it for a head dimension.
#pragma once
#include "device/mask.cuh"
#include "device/tile.cuh"
#include "launch.h"
#include "tiles.h"

namespace pk::cuda {

using namespace device;

struct Decode {
  const void* q;
  int64_t q_sequence, q_head;  // in elements
  TokenRows k, v;
  Pages pages;
  Scales k_scale, v_scale;
  DType code;  // of a quantised cache
  const int* seqlens;
  int64_t seqlens_stride;
  Scores scores;
  int64_t most_splits;
  int requested_split, heads, kv_heads, dim, dim_v;
  bool wide;  // rows of q, k and v allow 128-bit accesses
  float* partial;
  void* out;
  DType type;
  int64_t out_sequence, out_head;
  float* lse;
  int64_t lse_head, lse_sequence;

  __host__ __device__ int group() const { return heads / kv_heads; }
};

// What a split leaves: weighted values [padded dim_v], then the maximum (of log2 scores) and the sum of weights.
PK_DEVICE int64_t partial_floats(int dim_v) { return (dim_v + 2 + 3) / 4 * 4; }
PK_DEVICE float* partial_of(const Decode& c, int sequence, int head, int64_t split) {
  return c.partial + ((int64_t{sequence} * c.heads + head) * c.most_splits + split) * partial_floats(c.dim_v);
}

struct SplitKeys {
  int first, end;  // seen keys [first, end) of this split
  PK_DEVICE bool empty() const { return first >= end; }
};
PK_DEVICE int split_size(const Decode& c, int seqlen) { return static_cast<int>(split_keys(c.requested_split, seqlen)); }
PK_DEVICE SplitKeys keys_of(const Decode& c, int seqlen, int64_t split) {
  const int64_t size = split_size(c, seqlen);
  const Span seen = seen_by(c.scores, seqlen - 1, seqlen);
  const int64_t first = max(int64_t{seen.first}, split * size), end = min(int64_t{seen.last} + 1, (split + 1) * size);
  return {static_cast<int>(min(first, int64_t{seqlen})), static_cast<int>(max(end, int64_t{0}))};
}

// The splits' partial results; `dim`: padded.
template <class T>
cudaError_t launch_splits(const Decode&, int dim, unsigned batch, cudaStream_t);

}  // namespace pk::cuda
