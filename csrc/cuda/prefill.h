// The prefill kernel's arguments, and the one function that launches it for a head dimension.
#pragma once
#include "device/mask.cuh"
#include "device/tile.cuh"
#include "launch.h"
#include "tiles.h"

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

template <class T>
cudaError_t launch_prefill(const PrefillArgs&, int dim, cudaStream_t);  // dim: padded

}  // namespace pk::cuda
