// Temperature, min-p, top-k, top-p of one row: which prefix of the token order is kept.
#pragma once
#include <cmath>
#include <string>

#include "indices.h"
#include "token_prefix.h"

namespace pk {

// Filters of one row, normalised: top_k 0 and top_p 1 are off.
struct Filters {
  float temperature;
  int64_t top_k;
  float top_p, min_p;

  static constexpr int64_t kListed = 2048;      // up to here top-k collects its tokens in the scan; beyond, it searches
  static constexpr float kSupport = -103.972f;  // exp of less is 0 in float32 even as a denormal

  static Filters of(const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, int64_t row, int64_t vocab) {
    auto real = [row](const Tensor& t) { return t.as<float>()[row * t.stride[0]]; };
    Filters f{real(temperature), index_at(top_k, row), std::min(real(top_p), 1.f), real(min_p)};
    if (f.top_k <= 0 || f.top_k >= vocab) f.top_k = 0;
    if (f.top_p < 1e-30f) f.top_k = 1, f.top_p = 1.f;  // the first token always stays
    return f;
  }
  bool greedy() const { return temperature == 0.f; }
  bool listed() const { return !greedy() && top_k > 0 && top_k <= kListed; }
  bool keeps_all() const { return !greedy() && top_k == 0 && top_p == 1.f && min_p == 0.f; }
  // The smallest (x - max) / temperature that min-p and float32 leave.
  float floor() const { return min_p > 0.f ? std::max(float(std::log(double(min_p))), kSupport) : kSupport; }
  float depth(float x, float max) const { return (x - max) / temperature; }
};

inline void check_filters(const char* op, const Tensor& temperature, const Tensor& top_p, const Tensor& min_p, const Tensor& positions) {
  auto bounded = [op](const char* name, const Tensor& t, float high, const char* range) {
    for (int64_t i = 0; i < t.size[0]; ++i) {
      const float v = t.as<float>()[i * t.stride[0]];
      if (!(v >= 0.f && v <= high))
        fail(std::string(op) + ": " + name + "[" + std::to_string(i) + "] must be " + range + ", got " + std::to_string(v));
    }
  };
  bounded("temperature", temperature, std::numeric_limits<float>::max(), "at least 0 and finite");
  bounded("top_p", top_p, kInf, "at least 0");
  bounded("min_p", min_p, 1.f, "from 0 to 1");
  for (int64_t i = 0; i < positions.size[0]; ++i) check_index(op, "positions", i, index_at(positions, i), 0, INT64_MAX, "2^63 - 1");
}

// What is kept of a row. `list` holds the kept tokens in order when they are few and at hand.
struct Kept {
  Cut cut;
  const Token* list = nullptr;
  int64_t listed = 0;
};

// Collects the first k tokens of a row, each worker its own share of the tiles.
class Collection {
 public:
  void begin(int64_t k, int workers) {
    k_ = k, workers_ = workers;
    each_ = parts_.get<FirstTokens>(workers);
    tokens_ = buffer_.get<Token>(workers * FirstTokens::capacity(k));
    for (int w = 0; w < workers; ++w) (each_[w] = FirstTokens()).begin(tokens_ + w * FirstTokens::capacity(k), k);
  }
  void take(const TokenRow& row, int64_t tile, int worker) {
    if (row.tile_max[tile] > each_[worker].threshold()) each_[worker].take(row.tile(tile), row.size(tile), row.begin(tile));
  }
  // Sorted; returns how many.
  int64_t end(const Token*& list) {
    int64_t n = 0;
    for (int w = 0; w < workers_; ++w) {
      const Token* from = tokens_ + w * FirstTokens::capacity(k_);
      const int64_t count = each_[w].end();
      if (w > 0) std::copy(from, from + count, tokens_ + n);
      n += count;
    }
    if (n > k_) {
      std::nth_element(tokens_, tokens_ + k_ - 1, tokens_ + n);
      n = k_;
    }
    std::sort(tokens_, tokens_ + n);
    list = tokens_;
    return n;
  }

 private:
  Scratch parts_, buffer_;
  FirstTokens* each_ = nullptr;
  Token* tokens_ = nullptr;
  int64_t k_ = 0;
  int workers_ = 0;
};

// min-p, top-p over tokens that top-k has listed, in order; returns how many stay.
inline int64_t filter_listed(const Token* list, int64_t n, const Filters& f) {
  const float max = list[0].logit(), floor = f.floor();
  int64_t live = 1;
  while (live < n && f.depth(list[live].logit(), max) >= floor) ++live;
  if (f.top_p == 1.f) return live;
  auto weights = [&](int64_t i) {
    vf x = set1(-kInf);
    for (int j = 0; j < kLanes && i + j < live; ++j) x[j] = list[i + j].logit();
    return exp((x - max) / f.temperature);
  };
  double total = 0, reached = 0;
  for (int64_t i = 0; i < live; i += kLanes) {
    const vf w = weights(i);
    for (int j = 0; j < kLanes; ++j) total += w[j];
  }
  for (int64_t i = 0; i < live; i += kLanes) {
    const vf w = weights(i);
    for (int j = 0; j < kLanes && i + j < live; ++j) {
      reached += w[j];
      if (reached >= double(f.top_p) * total) return i + j + 1;
    }
  }
  return live;
}

// What one row needs beside its logits; lives across calls.
struct FilterSpace {
  Collection collection;
  Scratch weights, ends, list;

  PrefixSpace prefix(int64_t tiles) {
    return {weights.get<Weight>(tiles * PrefixSpace::kPivots), ends.get<float>(2 * tiles), list.get<Token>(PrefixSpace::kListed)};
  }
};

inline Kept keep_listed(FilterSpace& space, const Filters& f) {
  Kept kept;
  const int64_t n = space.collection.end(kept.list);
  kept.listed = filter_listed(kept.list, n, f);
  const Token& last = kept.list[kept.listed - 1];
  kept.cut = {last.logit(), last.id()};
  return kept;
}

// Filters of a scanned row (row.max is finite) that the scan itself did not collect.
inline Kept keep_searched(const TokenRow& row, const Filters& f, FilterSpace& space, const Spread& spread) {
  Kept kept;
  if (f.min_p > 0.f) kept.cut = {lowest_above(row.max, f.temperature, f.floor()), INT32_MAX};
  const PrefixSpace memory = space.prefix(row.tiles());
  if (f.top_k > 0) kept.cut = PrefixSearch(row, f.temperature, kept.cut, memory, spread).find({f.top_k, 0});
  if (f.top_p < 1.f) kept.cut = PrefixSearch(row, f.temperature, kept.cut, memory, spread).find({0, f.top_p});
  return kept;
}

}  // namespace pk
