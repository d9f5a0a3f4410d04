// The total order of a row's tokens, logit descending then id ascending, and the weights and noise that a draw is made of.
// A token is one integer; a larger one comes earlier in the order, so that every filter keeps the tokens from some integer up.
#pragma once
#include "common/philox.h"
#include "platform.cuh"

namespace pk::device {

// Integers in the order of the floats; -0 and 0 are one number.
PK_DEVICE uint32_t key_of(float x) {
  const uint32_t u = __float_as_uint(x + 0.f);
  return u >> 31 ? ~u : u | 0x80000000u;
}
PK_DEVICE uint64_t token_of(float logit, int id) { return uint64_t{key_of(logit)} << 32 | ~static_cast<uint32_t>(id); }
PK_DEVICE float logit_of(uint64_t token) {
  const auto key = static_cast<uint32_t>(token >> 32);
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}
PK_DEVICE int id_of(uint64_t token) { return static_cast<int>(~static_cast<uint32_t>(token)); }

// (y - top) / heat; 0 at the top even where that is infinite, for infinite logits share the probability equally.
PK_DEVICE float heated(float y, float top, float heat) {
  if (y == -INFINITY) return y;
  return y == top ? 0.f : (y - top) / heat;
}

// Weights, at most 1, are added as integers: any order of addition gives the same bits. Up to 2^20 tokens fit.
constexpr float kWeightUnit = 0x1p43f;
PK_DEVICE uint64_t fixed_weight(float weight) { return static_cast<uint64_t>(weight * kWeightUnit); }

constexpr float kLargestGumbel = 16.7f, kSmallestGumbel = -2.9f;  // of uniforms between 2^-24 and 1 - 2^-24
PK_DEVICE float gumbel(float uniform) { return -logf(-logf(uniform)); }

// The stream of one row.
struct Noise {
  int64_t seed, position;
  Purpose purpose;

  PK_DEVICE float at(int id) const {
    const PhiloxBlock drawn = block(id / 4);
    const uint32_t low = id & 1 ? drawn.word[1] : drawn.word[0], high = id & 1 ? drawn.word[3] : drawn.word[2];
    return gumbel(uniform_of(id & 2 ? high : low));
  }
  PK_DEVICE PhiloxBlock block(int index) const {
    const auto s = static_cast<uint64_t>(seed), p = static_cast<uint64_t>(position);
    const PhiloxBlock counter = {
        {static_cast<uint32_t>(index), static_cast<uint32_t>(purpose), static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32)}};
    return philox4x32(counter, static_cast<uint32_t>(s), static_cast<uint32_t>(s >> 32));
  }
};

}  // namespace pk::device
