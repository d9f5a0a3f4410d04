// One row of logits, seen in tiles: maxima, masses above pivots, and Gumbel draws. Every result per tile depends on the
// tile alone, and tiles are combined in order, so a row's bits do not depend on how tiles are spread over threads.
#pragma once
#include "denormals.h"
#include "noise.h"
#include "threads.h"
#include "token_order.h"

namespace pk {

constexpr int64_t kTile = 4096;  // 16 KB: a tile is read from memory once and from L1 after that

// Who works on the tiles: the whole team, or the calling thread when threads have rows of their own.
class Spread {
 public:
  explicit Spread(bool over_team) : over_team_(over_team) {}
  int workers() const { return over_team_ ? team().size() : 1; }
  // body(tile, worker) for every tile; each worker's tiles are contiguous and ascending.
  template <class Body>
  void run(int64_t tiles, Body&& body) const {
    if (workers() == 1) {
      const Denormals kept(true);  // logits are compared and ranked on all of float32
      for (int64_t t = 0; t < tiles; ++t) body(t, 0);
      return;
    }
    team().run([&](int worker) {
      const Denormals kept(true);
      const int64_t size = team().size(), begin = tiles * worker / size, end = tiles * (worker + 1) / size;
      for (int64_t t = begin; t < end; ++t) body(t, worker);
    });
  }

 private:
  bool over_team_;
};

struct TokenRow {
  const float* x;
  int64_t n;
  float* tile_max;  // [tiles()], filled by a scan; NaN where the tile holds one
  float max;

  int64_t tiles() const { return (n + kTile - 1) / kTile; }
  int64_t begin(int64_t tile) const { return tile * kTile; }
  int64_t size(int64_t tile) const { return std::min(kTile, n - begin(tile)); }
  const float* tile(int64_t t) const { return x + begin(t); }
};

// The largest value; NaN when there is one.
inline float largest_or_nan(const float* x, int64_t n) {
  vf a = set1(-kInf), b = a;
  vi nan = set1i(0);
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const vf u = load(x + i), v = load(x + i + kLanes);
    a = max(u, a), b = max(v, b);
    nan |= (u != u) | (v != v);
  }
  for (; i < n; i += kLanes) {
    const vf u = load_n(x + i, int(n - i), -kInf);
    a = max(u, a);
    nan |= u != u;
  }
  return any(nan) ? kNan : reduce_max(max(a, b));
}

// Combines the tile maxima; NaN when a tile has one.
inline float row_max(const TokenRow& row) {
  float top = -kInf;
  for (int64_t t = 0; t < row.tiles(); ++t) {
    if (row.tile_max[t] != row.tile_max[t]) return kNan;
    top = std::max(top, row.tile_max[t]);
  }
  return top;
}

// The first token of the order.
inline int64_t argmax(const TokenRow& row) {
  for (int64_t t = 0; t < row.tiles(); ++t) {
    if (row.tile_max[t] != row.max) continue;
    const float* x = row.tile(t);
    for (int64_t i = 0; i < row.size(t); ++i)
      if (x[i] == row.max) return row.begin(t) + i;
  }
  return -1;
}

// Float sums run over this many vectors before they are added in double: a whole tile in float would cost a digit.
constexpr int64_t kRun = 16 * kLanes;

// Sum of exp((x - anchor) / temperature) over kept tokens.
inline double mass_of(const float* x, int64_t n, int64_t first_id, Cut cut, float anchor, float temperature) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kRun) {
    vf sum = set1(0.f);
    for (int64_t i = begin; i < std::min(begin + kRun, n); i += kLanes) {
      const vf v = load_n(x + i, int(n - i), -kInf);
      sum += select(cut.keeps(v, iota() + int32_t(first_id + i)), exp((v - anchor) / temperature), set1(0.f));
    }
    total += reduce_add(sum);
  }
  return total;
}

// The best token so far, as a bound for those that follow. score = x / temperature + noise, up to a common shift.
struct Lead {
  float x = -kInf, noise = -kInf;
  static constexpr float kSlack = 0.01f;  // far above the rounding of scores

  // Whether no token with a logit up to `top` can win.
  bool beats(float top, float temperature) const { return (top - x) / temperature + kLargestGumbel + kSlack < noise; }
};

// Gumbel-max over the kept tokens of a tile: the id that wins, or -1 when none can beat the lead. `top` is the tile's
// largest logit; `skip` is an id to leave out (-1: none).
inline int64_t draw_tile(const float* x, int64_t n, int64_t first_id, float top, float temperature, Cut cut, int64_t skip,
                         const Noise& noise, Lead& lead) {
  if (top == -kInf || top < cut.value || lead.beats(top, temperature)) return -1;
  vf best = set1(-kInf);
  vi best_id = set1i(-1);
  float floor = (lead.x - top) / temperature + lead.noise - Lead::kSlack;  // scores below it cannot win
  for (int64_t i = 0; i < n; i += Noise::kBlock) {
    vf score[4];
    vi hope = set1i(0);
    for (int j = 0; j < 4; ++j) {
      const int64_t at = i + j * kLanes;
      const vf v = at < n ? load_n(x + at, int(n - at), -kInf) : set1(-kInf);
      const vi ids = iota() + int32_t(first_id + at);
      score[j] = select(cut.keeps(v, ids) & (ids != int32_t(skip)), (v - top) / temperature, set1(-kInf));
      hope |= score[j] > set1(floor - kLargestGumbel);
    }
    if (!any(hope)) continue;
    vf u[4];
    noise.block(first_id + i, u);
    vi better = set1i(0);
    for (int j = 0; j < 4; ++j) {
      if (!any(score[j] + gumbel_bound(u[j]) > set1(floor - Lead::kSlack))) continue;
      const vf s = score[j] + gumbel(u[j]);
      const vi wins = s > best;  // ids ascend, so a tie keeps the lower one
      best = select(wins, s, best);
      best_id = select(wins, iota() + int32_t(first_id + i + j * kLanes), best_id);
      better |= wins;
    }
    if (any(better)) floor = std::max(floor, reduce_max(best));
  }
  const float most = reduce_max(best);
  if (most == -kInf) return -1;
  int32_t id = INT32_MAX;
  for (int i = 0; i < kLanes; ++i)
    if (best[i] == most) id = std::min(id, best_id[i]);
  const float won = x[id - first_id], gain = most - (won - top) / temperature;
  if ((won - lead.x) / temperature + gain > lead.noise) lead = {won, gain};
  return id;
}

// Gumbel-max over a list of tokens; -1 when it is empty. Ties go to the lowest id.
inline int64_t draw_listed(const Token* tokens, int64_t n, float anchor, float temperature, const Noise& noise) {
  float most = -kInf;
  int64_t winner = -1;
  for (int64_t i = 0; i < n; i += kLanes) {
    vf x = set1(-kInf);
    vi ids = set1i(0);
    const int lanes = int(std::min<int64_t>(kLanes, n - i));
    for (int j = 0; j < lanes; ++j) x[j] = tokens[i + j].logit(), ids[j] = tokens[i + j].id();
    const vf score = (x - anchor) / temperature + gumbel(noise.at(ids));
    for (int j = 0; j < lanes; ++j)
      if (score[j] > most || (score[j] == most && ids[j] < winner)) most = score[j], winner = ids[j];
  }
  return winner;
}

}  // namespace pk
