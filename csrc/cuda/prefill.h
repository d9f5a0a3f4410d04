// The prefill kernel's arguments, and the one function that launches it for a head dimension.
#pragma once
#include "device/mask.cuh"
#include "device/tile.cuh"
#include "launch.h"

namespace pk::cuda {

struct PrefillArgs {
  device::TileSource q, k, v;
  char* out;
  int64_t out_row, out_head;  // bytes
  float* lse;                 // may be null
  int64_t lse_head, lse_row;
  const int *cu_seqlens_q, *cu_seqlens_k, *seqlens_k;  // one of the last two is null
  device::Pages pages;
  device::Scores scores;
  int batch, kv_heads, group, total_q, dim_v;
  int row_blocks;  // of the longest sequence
  bool out_aligned;
};

struct PrefillShape {
  int dim;   // columns of a tile: 64, 128 or 256
  int rows;  // query rows of a block
};

// Rows that a warp keeps in registers halve the reads of K and V; past 64 columns there is no room for two fragments.
inline PrefillShape prefill_shape(int64_t head_dim, int64_t head_dim_v) {
  const int64_t dim = std::max(head_dim, head_dim_v);
  if (dim <= 64) return {64, 128};
  if (dim <= 128) return {128, 64};
  return {256, 64};
}

template <class T>
cudaError_t launch_prefill(const PrefillArgs&, const PrefillShape&, cudaStream_t);

}  // namespace pk::cuda
