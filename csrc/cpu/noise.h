// The random stream of one row, a vector at a time, and Gumbel noise made from it.
#pragma once
#include "../common/philox.h"
#include "simd.h"

namespace pk {

// The high and low halves of a * m.
inline void multiply(vu a, uint32_t m, vu& high, vu& low) {
#if PK_AVX512
  const __m512i x = (__m512i)a, y = _mm512_set1_epi64(m);
  const __m512i even = _mm512_mul_epu32(x, y), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), y);
  high = (vu)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#elif PK_AVX2
  const __m256i x = (__m256i)a, y = _mm256_set1_epi64x(m);
  const __m256i even = _mm256_mul_epu32(x, y), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), y);
  high = (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
#else
  typedef uint64_t vul __attribute__((vector_size(8 * kLanes)));
  high = __builtin_convertvector((__builtin_convertvector(a, vul) * uint64_t(m)) >> 32, vu);
#endif
  low = a * m;
}

inline vf uniform_of(vu words) { return (to_float((vi)(words >> 9)) + set1(0.5f)) * set1(0x1p-23f); }

// -log(-log u): adding it to log-probabilities and taking the largest draws from their distribution.
// With 23-bit uniforms it lies within [-2.82, 16.64].
constexpr float kLargestGumbel = 16.64f;
inline vf gumbel(vf u) { return set1(0.f) - log(set1(0.f) - log(u)); }

// No less than gumbel(u) and without a logarithm: -log u >= 1 - u >= 2^e, with e the exponent of 1 - u. Most noise cannot
// win, and this says so for a tenth of the work.
inline vf gumbel_bound(vf u) { return to_float(127 - (as_i(set1(1.f) - u) >> 23)) * set1(0.693147182f); }

class Noise {
 public:
  static constexpr int kBlock = 4 * kLanes;

  Noise(int64_t seed, int64_t position, Purpose purpose)
      : seed_(uint64_t(seed)), position_(uint64_t(position)), purpose_(uint32_t(purpose)) {}

  // Uniforms of indices first .. first + kBlock - 1, in order; `first` is a multiple of 4.
  void block(int64_t first, vf u[4]) const {
    // Each 128-bit lane transposes its own four counters, so lane L takes every (kLanes / 4)-th counter from L on.
    const vi counters = (iota() & 3) * (kLanes / 4) + (iota() >> 2);
    vu w[4];
    words((vu)counters + uint32_t(first / 4), w);
    const vi lane = iota() & ~3;
    const vi low32 = lane + ((iota() & 3) >> 1) + (iota() & 1) * kLanes, low64 = lane + (iota() & 1) + ((iota() & 2) >> 1) * kLanes;
    const vu a = __builtin_shuffle(w[0], w[1], low32), b = __builtin_shuffle(w[0], w[1], low32 + 2);
    const vu c = __builtin_shuffle(w[2], w[3], low32), d = __builtin_shuffle(w[2], w[3], low32 + 2);
    u[0] = uniform_of(__builtin_shuffle(a, c, low64));
    u[1] = uniform_of(__builtin_shuffle(a, c, low64 + 2));
    u[2] = uniform_of(__builtin_shuffle(b, d, low64));
    u[3] = uniform_of(__builtin_shuffle(b, d, low64 + 2));
  }

  // Uniforms of any indices.
  vf at(vi index) const {
    vu w[4];
    words((vu)(index >> 2), w);
    const vi word = index & 3;
    return uniform_of((vu)select(word < 2, select(word == 0, (vi)w[0], (vi)w[1]), select(word == 2, (vi)w[2], (vi)w[3])));
  }

 private:
  void words(vu counter, vu w[4]) const {
    vu c0 = counter, c1 = vu{} + purpose_, c2 = vu{} + uint32_t(position_), c3 = vu{} + uint32_t(position_ >> 32);
    uint32_t k0 = uint32_t(seed_), k1 = uint32_t(seed_ >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < kPhiloxRounds; ++round) {
      vu high0, low0, high1, low1;
      multiply(c0, kPhiloxM0, high0, low0);
      multiply(c2, kPhiloxM1, high1, low1);
      c0 = high1 ^ c1 ^ k0;
      c1 = low1;
      c2 = high0 ^ c3 ^ k1;
      c3 = low0;
      k0 += kPhiloxW0;
      k1 += kPhiloxW1;
    }
    w[0] = c0, w[1] = c1, w[2] = c2, w[3] = c3;
  }

  uint64_t seed_, position_;
  uint32_t purpose_;
};

}  // namespace pk
