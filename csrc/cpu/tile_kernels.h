// The tile kernels of every packed format and width, as tables, so that the host code never sees their templates.
#pragma once
#include <array>

#include "simd.h"
#include "weight_layout.h"

namespace pk {

// Tokens that share one pass over a row block. AVX2: 6 tokens x 2 vectors are 12 accumulators, 2 weights, a broadcast;
// with 8-bit activations 5 tokens x 2 vectors (4 or 6 are 3 % slower).
constexpr int kFloatWidth = kLanes == 8 ? 6 : 8;
constexpr int kDotWidth = kLanes == 8 ? 5 : 8;
constexpr int kMaxWidth = kFloatWidth > kDotWidth ? kFloatWidth : kDotWidth;

// A row block times `width` tokens: out[width][16]. `x` is a tile of activations prepared for this kind of kernel.
using TileKernel = void (*)(const uint8_t* block, int64_t k, const uint8_t* x, float* out);
using TileKernels = std::array<TileKernel, kMaxWidth>;  // by width - 1

// x is [k][width] floats.
const TileKernels& float_kernels(WeightFormat format);
// bfloat16 weights times bfloat16 activations: x is [ceil(k / 2)][width] pairs. Null where the level has no such product.
const TileKernels* pair_kernels();
// x is quantised (dot_kernels.cpp). Null for a format without codes.
const TileKernels* dot_kernels(WeightFormat format);

// Of one token and one group in a quantised tile of W tokens: per group [8][W] quads of codes, [W] float32 scales, [W]
// corrections. The correction makes up for unsigned weight codes: -offset x sum(code) as an integer, or for q4_1
// scale x sum(code) as a float, to be multiplied by the minimum.
constexpr int kGroupBytes = 40;
constexpr int weight_offset(WeightFormat f) { return f == WeightFormat::q4_0 ? 8 : 128; }

}  // namespace pk
