// The shortest prefix of the token order that reaches a count or a mass, without sorting the row: a few passes narrow the
// logit at which it ends, then only the tokens around that logit are sorted. Exact for any k and p, and bounded.
#pragma once
#include "token_row.h"

namespace pk {

struct Weight {
  double mass = 0;
  int64_t count = 0;
};

// What the prefix must reach: `count` tokens, or the share `mass_share` of the mass when count is 0.
struct Target {
  int64_t count;
  double mass_share;
};

// Memory for one search: per tile and for the last sort.
struct PrefixSpace {
  static constexpr int kPivots = 8;         // the first is "everything"
  static constexpr int64_t kListed = 1024;  // tokens that are sorted at the end
  Weight* weights;                          // [tiles, kPivots]
  float* ends;                              // [tiles, 2]
  Token* list;                              // [kListed]
};

class PrefixSearch {
 public:
  PrefixSearch(const TokenRow& row, float temperature, Cut within, PrefixSpace space, const Spread& spread)
      : row_(row), temperature_(temperature), within_(within), space_(space), spread_(spread) {}

  Cut find(Target target) {
    const Denormals kept(true);
    by_count_ = target.count > 0;
    weigh(first_pivots());
    const Weight all = sums_[0];
    if (by_count_ && all.count <= target.count) return within_;
    amount_ = by_count_ ? double(target.count) : target.mass_share * all.mass;
    low_ = rank_of(-kInf) + 1, high_ = rank_of(row_.max) + 1, below_ = all, above_ = {};
    narrow();
    for (int pass = 0; below_.count - above_.count > PrefixSpace::kListed; ++pass) {
      tighten();
      if (high_ - low_ == 1) break;
      weigh(pass < 3 ? value_pivots() : rank_pivots());
      narrow();
    }
    return below_.count - above_.count <= PrefixSpace::kListed ? cut_in_list() : cut_in_ties();
  }

 private:
  static constexpr int kPivots = PrefixSpace::kPivots;
  struct Pivots {
    uint32_t rank[kPivots];  // ascending; the first is that of -inf
  };

  // e-folds below the maximum: where a language model's mass lies.
  Pivots first_pivots() const {
    static constexpr float depth[kPivots - 1] = {32.f, 16.f, 8.f, 4.f, 2.f, 1.f, 0.5f};
    Pivots p{{rank_of(-kInf)}};
    for (int i = 1; i < kPivots; ++i) p.rank[i] = rank_of(row_.max - depth[i - 1] * temperature_);
    return p;
  }
  Pivots value_pivots() const {
    const double a = value_of_rank(low_), b = value_of_rank(high_);
    Pivots p{{rank_of(-kInf)}};
    for (int i = 1; i < kPivots; ++i) p.rank[i] = rank_of(float(a + (b - a) * i / kPivots));
    return p;
  }
  Pivots rank_pivots() const {
    Pivots p{{rank_of(-kInf)}};
    for (int i = 1; i < kPivots; ++i) p.rank[i] = low_ + uint32_t(uint64_t(high_ - low_) * i / kPivots);
    return p;
  }

  bool reached(const Weight& w) const { return (by_count_ ? double(w.count) : w.mass) >= amount_; }

  // Keeps [low, high) around the end: the weight from low up reaches the target, from high up it does not.
  void narrow() {
    for (int i = 1; i < kPivots; ++i) {
      if (pivots_.rank[i] <= low_ || pivots_.rank[i] >= high_) continue;
      if (!reached(sums_[i])) {
        high_ = pivots_.rank[i], above_ = sums_[i];
        return;
      }
      low_ = pivots_.rank[i], below_ = sums_[i];
    }
  }

  // Weight of the kept tokens at or above every pivot, summed tile by tile.
  void weigh(const Pivots& pivots) {
    pivots_ = pivots;
    spread_.run(row_.tiles(), [&](int64_t t, int) { weigh_tile(t, space_.weights + t * kPivots); });
    for (int i = 0; i < kPivots; ++i) {
      sums_[i] = {};
      for (int64_t t = 0; t < row_.tiles(); ++t) {
        sums_[i].mass += space_.weights[t * kPivots + i].mass;
        sums_[i].count += space_.weights[t * kPivots + i].count;
      }
    }
  }

  void weigh_tile(int64_t t, Weight* out) const {
    alignas(64) float kept[kTile], weight[kTile];
    const int64_t n = row_.size(t), first = row_.begin(t), padded = (n + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = 0; i < n; i += kLanes) {
      const vf x = load_n(row_.tile(t) + i, int(n - i), -kInf);
      const vf v = select(within_.keeps(x, iota() + int32_t(first + i)), x, set1(-kInf));
      store(kept + i, v);
      store(weight + i, exp((v - row_.max) / temperature_));
    }
    for (int p = 0; p < kPivots; ++p) {
      out[p] = {};
      const float pivot = p == 0 ? std::numeric_limits<float>::lowest() : value_of_rank(pivots_.rank[p]);
      if (row_.tile_max[t] < pivot) continue;
      for (int64_t begin = 0; begin < padded; begin += kRun) {
        vf mass = set1(0.f);
        vi count = set1i(0);
        for (int64_t i = begin; i < std::min(begin + kRun, padded); i += kLanes) {
          const vi in = load(kept + i) >= pivot;
          mass += as_f(as_i(load(weight + i)) & in);
          count -= in;
        }
        out[p].mass += reduce_add(mass);
        for (int lane = 0; lane < kLanes; ++lane) out[p].count += count[lane];
      }
    }
  }

  // Moves both ends of the interval to logits that are there, so that ties end the search at once.
  void tighten() {
    const float low = value_of_rank(low_), high = value_of_rank(high_);
    spread_.run(row_.tiles(), [&](int64_t t, int) {
      vf least = set1(kInf), most = set1(-kInf);
      for (int64_t i = 0; row_.tile_max[t] >= low && i < row_.size(t); i += kLanes) {
        const vf x = load_n(row_.tile(t) + i, int(row_.size(t) - i), -kInf);
        const vi in = (x >= low) & (x < high) & within_.keeps(x, iota() + int32_t(row_.begin(t) + i));
        least = min(select(in, x, set1(kInf)), least);
        most = max(select(in, x, set1(-kInf)), most);
      }
      space_.ends[2 * t] = -reduce_max(-least), space_.ends[2 * t + 1] = reduce_max(most);
    });
    float least = kInf, most = -kInf;
    for (int64_t t = 0; t < row_.tiles(); ++t) least = std::min(least, space_.ends[2 * t]), most = std::max(most, space_.ends[2 * t + 1]);
    low_ = rank_of(least), high_ = rank_of(most) + 1;
  }

  // The interval holds few tokens: sort them and walk.
  Cut cut_in_list() const {
    const float low = value_of_rank(low_), high = value_of_rank(high_);
    int64_t n = 0;
    for (int64_t t = 0; t < row_.tiles(); ++t) {
      if (row_.tile_max[t] < low) continue;
      for (int64_t i = 0; i < row_.size(t); i += kLanes) {
        const vf x = load_n(row_.tile(t) + i, int(row_.size(t) - i), -kInf);
        const int64_t id = row_.begin(t) + i;
        for (uint32_t hits = bits_of((x >= low) & (x < high) & within_.keeps(x, iota() + int32_t(id))); hits; hits &= hits - 1) {
          const int lane = __builtin_ctz(hits);
          space_.list[n++] = Token::of(x[lane], id + lane);
        }
      }
    }
    std::sort(space_.list, space_.list + n);
    Weight w = above_;
    int64_t last = 0;
    for (int64_t i = 0; i < n && (i == 0 || !reached(w)); ++i) {
      w.mass += weight_of(space_.list[i].logit());
      w.count += 1;
      last = i;
    }
    return {space_.list[last].logit(), space_.list[last].id()};
  }

  // The interval is one logit that many tokens share: keep as many of them as it takes, lowest ids first.
  Cut cut_in_ties() const {
    const float value = value_of_rank(low_);
    const double each = weight_of(value), missing = by_count_ ? amount_ - double(above_.count) : (amount_ - above_.mass) / each;
    int64_t wanted = std::max<int64_t>(1, std::min<int64_t>(below_.count - above_.count, int64_t(std::ceil(missing))));
    for (int64_t i = 0; i < row_.n; ++i)
      if (row_.x[i] == value && within_.keeps(value, i) && --wanted == 0) return {value, int32_t(i)};
    return within_;
  }

  double weight_of(float x) const { return exp((set1(x) - row_.max) / temperature_)[0]; }

  const TokenRow& row_;
  float temperature_;
  Cut within_;
  PrefixSpace space_;
  const Spread& spread_;
  bool by_count_ = false;
  double amount_ = 0;
  Pivots pivots_{};
  Weight sums_[kPivots], below_, above_;
  uint32_t low_ = 0, high_ = 0;
};

// The lowest logit x with (x - max) / temperature >= floor, by bisection over the floats.
inline float lowest_above(float max, float temperature, float floor) {
  uint32_t out = rank_of(-kInf), in = rank_of(max);
  while (in - out > 1) {
    const uint32_t mid = out + (in - out) / 2;
    ((value_of_rank(mid) - max) / temperature >= floor ? in : out) = mid;
  }
  return value_of_rank(in);
}

}  // namespace pk
