// The prefill kernel's arguments, and the one function that launches it for a head dimension.
#pragma once
#include "device/mask.cuh"
#include "device/tile.cuh"
#include "launch.h"
#include "tiles.h"

namespace pk::cuda {

// Rows of q, k or v, and how they are read.
struct TileSource {
  device::TokenRows rows;
  device::Scales scales;
  int bytes;  // of a row; columns past it are zero
};

struct PrefillArgs {
  TileSource q, k, v;
  bool aligned;  // every row of the three begins on 16 bytes
  DType code;    // of a quantised cache
  char* out;
  int64_t out_row, out_head;  // bytes
  float* lse;                 // may be null
  int64_t lse_head, lse_row;
  const int *cu_seqlens_q, *cu_seqlens_k, *seqlens_k;  // one of the last two is null
  device::Pages pages;
  device::Scores scores;
  device::Divider group;  // query heads of a kv head
  int batch, kv_heads, total_q, dim_v;
  int row_blocks;  // of the longest sequence
  bool out_aligned;
};

template <class T>
cudaError_t launch_prefill(const PrefillArgs&, int dim, cudaStream_t);  // dim: padded

}  // namespace pk::cuda
