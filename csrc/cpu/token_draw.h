// One row from its logits to a token: scan, filter, draw. Sampling and draft verification both work through it.
#pragma once
#include "token_filter.h"

namespace pk {

// Memory of the thread that owns a row; lives across calls.
struct DrawSpace {
  Scratch settled, maxima, winners, leads, sums, finalists;
  FilterSpace filter;
};

class TokenDraw {
 public:
  TokenDraw(const Spread& spread, DrawSpace& space) : spread_(spread), space_(space) {}

  const TokenRow& row() const { return row_; }
  const Kept& kept() const { return kept_; }
  // Whether the row defines a distribution: no NaN, and something above -inf.
  bool valid() const { return row_.max == row_.max && row_.max > -kInf; }

  // One pass over the logits. `prepare(tile)` is called before x is read there, and says whether the tile is spoilt by a
  // NaN that x no longer shows. With `noise`, a row that no filter touches is drawn in the same pass.
  template <class Prepare>
  void scan(const float* x, int64_t n, const Filters& filters, const Noise* noise, Prepare&& prepare) {
    row_ = {x, n, nullptr, 0};
    row_.tile_max = space_.maxima.get<float>(row_.tiles());
    filters_ = filters;
    kept_ = {};
    drawn_ = noise && filters.keeps_all();
    pass(noise, prepare);
    if (row_.max != kInf) return;
    settle(row_, space_.settled);
    pass(noise, [](int64_t) { return false; });
  }

  // Where a row has infinite logits they share its probability: 0 there, -inf elsewhere.
  static void settle(TokenRow& row, Scratch& memory) {
    float* out = memory.get<float>(row.n);
    for (int64_t i = 0; i < row.n; ++i) out[i] = row.x[i] == kInf ? 0.f : -kInf;
    row.x = out;
  }

  // Applies the filters to a valid row.
  void keep() {
    if (filters_.greedy()) {
      kept_.cut = {row_.max, int32_t(argmax(row_))};
    } else if (filters_.listed()) {
      kept_ = keep_listed(space_.filter, filters_);
    } else if (!filters_.keeps_all()) {
      kept_ = keep_searched(row_, filters_, space_.filter, spread_);
    }
  }

  // A kept token other than `skip`, by Gumbel-max; -1 when there is none.
  int64_t draw(const Noise& noise, int64_t skip = -1) {
    if (filters_.greedy()) return kept_.cut.last == skip ? -1 : kept_.cut.last;
    if (kept_.list && skip < 0) return draw_listed(kept_.list, kept_.listed, row_.max, filters_.temperature, noise);
    if (!drawn_ || skip >= 0) {
      begin_winners();
      spread_.run(row_.tiles(), [&](int64_t t, int worker) { draw_in(t, worker, skip, noise); });
    }
    Token* list = space_.finalists.get<Token>(row_.tiles());
    int64_t n = 0;
    for (int64_t t = 0; t < row_.tiles(); ++t)
      if (winners_[t] >= 0) list[n++] = Token::of(row_.x[winners_[t]], winners_[t]);
    return draw_listed(list, n, row_.max, filters_.temperature, noise);
  }

  // exp((x - max) / temperature) summed over the kept tokens.
  double mass() { return filters_.greedy() ? 1.0 : mass(row_, filters_.temperature, kept_.cut); }
  double mass(const TokenRow& row, float temperature, Cut cut) {
    double* sums = space_.sums.get<double>(row.tiles());
    spread_.run(row.tiles(), [&](int64_t t, int) {
      const bool none = row.tile_max[t] < cut.value;
      sums[t] = none ? 0.0 : mass_of(row.tile(t), row.size(t), row.begin(t), cut, row.max, temperature);
    });
    double total = 0;
    for (int64_t t = 0; t < row.tiles(); ++t) total += sums[t];
    return total;
  }

 private:
  template <class Prepare>
  void pass(const Noise* noise, Prepare&& prepare) {
    const bool lists = filters_.listed();
    if (lists) space_.filter.collection.begin(filters_.top_k, spread_.workers());
    if (drawn_) begin_winners();
    spread_.run(row_.tiles(), [&](int64_t t, int worker) {
      const bool spoilt = prepare(t);
      row_.tile_max[t] = spoilt ? kNan : largest_or_nan(row_.tile(t), row_.size(t));
      if (lists) space_.filter.collection.take(row_, t, worker);
      if (drawn_) draw_in(t, worker, -1, *noise);
    });
    row_.max = row_max(row_);
  }

  void begin_winners() {
    winners_ = space_.winners.get<int64_t>(row_.tiles());
    leads_ = space_.leads.get<Lead>(spread_.workers());
    std::fill_n(leads_, spread_.workers(), Lead{});
  }
  void draw_in(int64_t t, int worker, int64_t skip, const Noise& noise) {
    winners_[t] = draw_tile(row_.tile(t), row_.size(t), row_.begin(t), row_.tile_max[t], filters_.temperature, kept_.cut, skip, noise,
                            leads_[worker]);
  }

  const Spread& spread_;
  DrawSpace& space_;
  TokenRow row_{};
  Filters filters_{};
  Kept kept_;
  bool drawn_ = false;  // the scan has drawn already
  int64_t* winners_ = nullptr;
  Lead* leads_ = nullptr;
};

// Rows over the team, or each row over the team when there are fewer rows than threads. rows(begin, end, spread).
template <class Rows>
void over_rows(int64_t count, int64_t vocab, Rows&& rows) {
  constexpr int64_t kSplitVocab = 16384;  // below it one thread is done before another has woken
  auto exact = [&](int64_t begin, int64_t end, const Spread& spread) {
    const Denormals kept(true);
    rows(begin, end, spread);
  };
  if (count < team().size() && vocab >= kSplitVocab) return exact(0, count, Spread(true));
  team().parallel_for(count, 1, [&](int64_t begin, int64_t end, int) { exact(begin, end, Spread(false)); });
}

}  // namespace pk
