// The total order of a row's tokens: logit descending, id ascending. Every filter keeps a prefix of it.
#pragma once
#include <algorithm>

#include "simd.h"

namespace pk {

// One bit per lane of a comparison.
inline uint32_t bits_of(vi mask) {
#if PK_AVX512
  return _mm512_movepi32_mask((__m512i)mask);
#elif PK_AVX2
  return uint32_t(_mm256_movemask_ps((__m256)mask));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= uint32_t(mask[i] & 1) << i;
  return bits;
#endif
}
inline bool any(vi mask) { return bits_of(mask) != 0; }

// Unsigned integers in the order of the floats; -0 and 0 are one number.
inline uint32_t rank_of(float x) {
  const uint32_t u = float_to_bits(x + 0.f);
  return u >> 31 ? ~u : u | 0x80000000;
}
inline float value_of_rank(uint32_t rank) { return bits_to_float(rank >> 31 ? rank & 0x7fffffff : ~rank); }

// A token as one integer; a smaller one comes earlier in the order.
struct Token {
  uint64_t key;

  static Token of(float logit, int64_t id) { return {uint64_t(~rank_of(logit)) << 32 | uint32_t(id)}; }
  float logit() const { return value_of_rank(~uint32_t(key >> 32)); }
  int32_t id() const { return int32_t(uint32_t(key)); }
  bool operator<(const Token& other) const { return key < other.key; }
};

// A prefix of the order: logits above `value`, and those equal to it with an id up to `last`. By default all but -inf.
struct Cut {
  float value = -kInf;
  int32_t last = -1;

  vi keeps(vf x, vi ids) const { return (x > set1(value)) | ((x == set1(value)) & (ids <= last)); }
  bool keeps(float x, int64_t id) const { return x > value || (x == value && id <= last); }
};

// Collects the first k tokens of the order from logits that come in any chunks with ascending ids.
class FirstTokens {
 public:
  static int64_t capacity(int64_t k) { return 2 * k + 1024; }

  void begin(Token* buffer, int64_t k) { buffer_ = buffer, k_ = k, count_ = 0, threshold_ = -kInf; }
  // No logit at or below this can get in any more.
  float threshold() const { return threshold_; }

  void take(const float* x, int64_t n, int64_t first_id) {
    constexpr int kGroup = 4 * kLanes;
    int64_t i = 0;
    for (; i + kGroup <= n; i += kGroup) {
      const vf a = load(x + i), b = load(x + i + kLanes), c = load(x + i + 2 * kLanes), d = load(x + i + 3 * kLanes);
      if (!any(max(max(a, b), max(c, d)) > set1(threshold_))) continue;
      put(a, first_id + i), put(b, first_id + i + kLanes), put(c, first_id + i + 2 * kLanes), put(d, first_id + i + 3 * kLanes);
      if (count_ + kGroup > capacity(k_)) shrink();
    }
    for (; i < n; i += kLanes) put(load_n(x + i, int(n - i), -kInf), first_id + i);
    if (count_ + kGroup > capacity(k_)) shrink();
  }

  // Moves the tokens to the front of the buffer, at most k, unsorted; returns how many.
  int64_t end() {
    shrink();
    return count_;
  }

 private:
  void put(vf v, int64_t id) {
    for (uint32_t hits = bits_of(v > set1(threshold_)); hits; hits &= hits - 1) {
      const int lane = __builtin_ctz(hits);
      buffer_[count_++] = Token::of(v[lane], id + lane);
    }
  }
  void shrink() {
    if (count_ <= k_) return;
    std::nth_element(buffer_, buffer_ + k_ - 1, buffer_ + count_);
    count_ = k_;
    threshold_ = buffer_[k_ - 1].logit();
  }

  Token* buffer_ = nullptr;
  int64_t k_ = 0, count_ = 0;
  float threshold_ = -kInf;
};

}  // namespace pk
