// What prefill and decode share: which keys a query sees, what is added to its scores, and the check of index tensors.
#pragma once
#include <algorithm>
#include <string>

#include "dispatch.h"
#include "softmax.h"

namespace pk {

// Keys [begin, end).
struct Range {
  int64_t begin, end;

  bool empty() const { return begin >= end; }
  Range meet(Range o) const { return {std::max(begin, o.begin), std::min(end, o.end)}; }
  Range join(Range o) const { return empty() ? o : o.empty() ? *this : Range{std::min(begin, o.begin), std::max(end, o.end)}; }
  bool covers(Range o) const { return begin <= o.begin && o.end <= end; }
};

// The mask and the score options of one call, ready for use.
class Scoring {
 public:
  explicit Scoring(const Mask& m)
      : left_(m.window_left),
        right_(m.causal ? 0 : m.window_right),
        scale_(m.softmax_scale),
        cap_(float(m.softcap)),
        alibi_(m.alibi_slopes),
        sinks_(m.sinks) {}

  // Keys that the query at absolute position p (of `keys` keys) sees. p is negative for queries before the first key.
  Range visible(int64_t p, int64_t keys) const {
    const int64_t begin = left_ < 0 || left_ >= p ? 0 : p - left_, end = right_ < 0 || right_ >= keys - p ? keys : p + right_ + 1;
    return {begin, std::max(begin, end)};
  }
  // Keys that queries [p, last] see together.
  Range visible(int64_t p, int64_t last, int64_t keys) const {
    return {visible(p, keys).begin, std::max(visible(p, keys).begin, visible(last, keys).end)};
  }

  // Whether q.k needs nothing but a positive factor; otherwise `shape` makes scores of it, with factor 1.
  bool plain() const { return cap_ == 0.f && !alibi_ && scale_ > 0.0; }
  double factor() const { return plain() ? scale_ : 1.0; }
  float sink(int64_t head) const { return sinks_ ? sinks_.as<float>()[head * sinks_.stride[0]] : -kInf; }

  // Scale, soft cap, then ALiBi, on q.k of keys first, first + 1, ... for the query at position p.
  void shape(float* scores, int begin, int end, int64_t sequence, int64_t head, int64_t p, int64_t first) const {
    const float slope = slope_of(sequence, head);
    for (int v = begin; v < end; ++v) {
      vf s = load(scores + v * kLanes) * set1(float(scale_));
      if (cap_ > 0.f) s = set1(cap_) * tanh(s / set1(cap_));
      if (alibi_) s = s - set1(slope) * abs(to_float(iota() + set1i(int32_t(first + v * kLanes - p))));
      store(scores + v * kLanes, s);
    }
  }

 private:
  float slope_of(int64_t sequence, int64_t head) const {
    if (!alibi_) return 0.f;
    const int64_t* s = alibi_.stride;
    return alibi_.as<float>()[alibi_.ndim == 1 ? head * s[0] : sequence * s[0] + head * s[1]];
  }

  int64_t left_, right_;  // -1: unbounded
  double scale_;
  float cap_;
  const Tensor &alibi_, &sinks_;
};

// Scores of keys outside `seen` become -inf; score i belongs to key first + i. Vectors [begin, end).
inline void hide(float* scores, int begin, int end, int64_t first, Range seen) {
  const int32_t lo = int32_t(std::clamp<int64_t>(seen.begin - first, 0, kBlock)),
                hi = int32_t(std::clamp<int64_t>(seen.end - first, 0, kBlock));
  for (int v = begin; v < end; ++v) {
    const vi key = iota() + set1i(v * kLanes);
    store(scores + v * kLanes, select((key >= set1i(lo)) & (key < set1i(hi)), load(scores + v * kLanes), set1(-kInf)));
  }
}

// ---- checks of index contents: on the calling thread, before anything is written -----------------------------------
[[noreturn]] inline void refuse(const char* op, const std::string& what, const std::string& expected, int64_t got) {
  fail(std::string(op) + ": " + what + " must be " + expected + ", got " + std::to_string(got));
}
inline std::string at(const char* name, int64_t i) { return std::string(name) + "[" + std::to_string(i) + "]"; }

// cu_seqlens starts at 0, never decreases, ends within `total` rows, and no sequence is longer than the bound.
inline void check_cu_seqlens(const char* op, const char* name, const Tensor& cu, int64_t total, const char* bound_name, int64_t bound) {
  int64_t longest = 0, previous = 0;
  for (int64_t i = 0; i < cu.size[0]; ++i) {
    const int64_t value = index_at(cu, i);
    if (i == 0 && value != 0) refuse(op, at(name, 0), "0", value);
    if (value < previous) refuse(op, at(name, i), "at least " + at(name, i - 1) + " = " + std::to_string(previous), value);
    if (value > total) refuse(op, at(name, i), "at most the number of rows, " + std::to_string(total), value);
    longest = std::max(longest, value - previous);
    previous = value;
  }
  if (longest > bound) refuse(op, bound_name, "at least the longest sequence, " + std::to_string(longest) + " (" + name + ")", bound);
}

inline void check_seqlen(const char* op, const Tensor& seqlens, int64_t b, const Tensor& table, int64_t page_size) {
  const int64_t capacity = table.size[1] * page_size, value = index_at(seqlens, b);
  if (value < 0 || value > capacity)
    refuse(op, at("seqlens_k", b),
           "in [0, " + std::to_string(capacity) + "] (block_table has " + std::to_string(table.size[1]) + " pages of " +
               std::to_string(page_size) + ")",
           value);
}

// The table entries that hold `keys` of sequence b; entries of keys that nobody sees are not looked at.
inline void check_pages(const char* op, const Tensor& table, int64_t b, Range keys, int64_t page_size, int64_t num_pages) {
  if (keys.empty()) return;
  const int32_t* row = table.as<int32_t>() + b * table.stride[0];
  for (int64_t i = keys.begin / page_size; i <= (keys.end - 1) / page_size; ++i)
    if (row[i] < 0 || row[i] >= num_pages)
      refuse(op, "block_table[" + std::to_string(b) + ", " + std::to_string(i) + "]", "a page in [0, " + std::to_string(num_pages) + ")",
             row[i]);
}

}  // namespace pk
