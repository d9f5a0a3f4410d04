// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed by (seed, position).
// Plain functions for host and device: every backend draws the same bits.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define PK_HOST_DEVICE __host__ __device__
#else
#define PK_HOST_DEVICE
#endif

namespace pk {

// Independent streams at one (seed, position).
enum class Purpose : uint32_t { sample = 0, accept = 1, resample = 2 };

constexpr uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;  // multipliers
constexpr uint32_t kPhiloxW0 = 0x9E3779B9, kPhiloxW1 = 0xBB67AE85;  // key increments
constexpr int kPhiloxRounds = 10;

struct PhiloxBlock {
  uint32_t word[4];
};

PK_HOST_DEVICE inline PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t(kPhiloxM0) * c0, p1 = uint64_t(kPhiloxM1) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ key0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ key1;
    c3 = uint32_t(p0);
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

// A word to a uniform in (0, 1), exact in float32. 23 bits, because 24 would round up to 1.
PK_HOST_DEVICE inline float uniform_of(uint32_t word) { return (float(word >> 9) + 0.5f) * 1.1920928955078125e-7f; }

// Four uniforms come out of one block: element `index` is word index % 4 of counter (index / 4, purpose, position).
PK_HOST_DEVICE inline float philox_uniform(int64_t seed, int64_t position, Purpose purpose, int64_t index) {
  const uint64_t s = uint64_t(seed), p = uint64_t(position);
  const PhiloxBlock counter = {{uint32_t(index / 4), uint32_t(purpose), uint32_t(p), uint32_t(p >> 32)}};
  return uniform_of(philox4x32(counter, uint32_t(s), uint32_t(s >> 32)).word[index % 4]);
}

}  // namespace pk
