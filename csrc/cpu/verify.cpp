// Draft verification: chain rejection sampling (Leviathan et al., "Fast inference from transformers via speculative
// decoding", ICML 2023) against the warped target distribution.
#include "kernels.h"
#include "logit_adjust.h"
#include "token_draw.h"

namespace pk {
namespace {

struct VerifySpace {
  Scratch logits, winners;
  DrawSpace draw;
};

// The best token of a tile for the residual distribution.
struct Winner {
  float score;
  int64_t id;
};

class RequestVerifier {
 public:
  RequestVerifier(const VerifyParams& p, int64_t b, const Spread& spread, VerifySpace& space)
      : p_(p),
        b_(b),
        vocab_(p.target_logits.size[1]),
        first_(index_at(p.cu_draft, b)),
        length_(index_at(p.cu_draft, b + 1) - first_),
        seed_(index_at(p.seeds, b)),
        position_(index_at(p.positions, b)),
        spread_(spread),
        space_(space),
        draw_(spread, space.draw),
        filters_(Filters::of(p.temperature, p.top_k, p.top_p, p.min_p, b, vocab_)) {}

  void run() {
    int64_t* ids = p_.ids.as<int64_t>() + b_ * p_.ids.stride[0];
    std::fill_n(ids, p_.ids.size[1], -1);
    int32_t accepted = 0;
    for (int64_t step = 0; step <= length_; ++step) {
      load(step);
      if (!draw_.valid()) break;  // a NaN or nothing above -inf: the request ends with -1
      draw_.keep();
      if (step == length_) {
        ids[step] = draw_.draw(Noise(seed_, position_ + step, Purpose::sample));
        break;
      }
      const int64_t drafted = index_at(p_.draft_ids, first_ + step);
      mass_ = draw_.mass();
      if (!accepts(step, drafted)) {
        ids[step] = replacement(step, drafted);
        break;
      }
      ids[step] = drafted, ++accepted;
    }
    p_.num_accepted.as<int32_t>()[b_ * p_.num_accepted.stride[0]] = accepted;
  }

 private:
  void load(int64_t step) {
    const int64_t r = first_ + b_ + step;
    visit_float(p_.target_logits.dtype, [&]<class T>() {
      const T* given = p_.target_logits.as<T>() + r * p_.target_logits.stride[0];
      if constexpr (std::is_same_v<T, float>) {
        draw_.scan(given, vocab_, filters_, nullptr, [](int64_t) { return false; });
      } else {
        float* x = space_.logits.get<float>(vocab_);
        draw_.scan(x, vocab_, filters_, nullptr, [&](int64_t t) {
          widen(given + t * kTile, x + t * kTile, std::min(kTile, vocab_ - t * kTile));
          return false;
        });
      }
    });
  }

  const float* draft_probs(int64_t step) const {
    return p_.draft_probs ? p_.draft_probs.as<float>() + (first_ + step) * p_.draft_probs.stride[0] : nullptr;
  }

  bool accepts(int64_t step, int64_t drafted) const {
    const TokenRow& row = draw_.row();
    const float x = row.x[drafted];
    double p = 0;
    if (filters_.greedy())
      p = drafted == draw_.kept().cut.last;
    else if (draw_.kept().cut.keeps(x, drafted))
      p = std::exp((double(x) - row.max) / filters_.temperature) / mass_;
    const double q = p_.draft_probs ? draft_probs(step)[drafted] : 1.0;
    return philox_uniform(seed_, position_ + step, Purpose::accept, 0) * q < p;
  }

  // A draw from max(p - q, 0); from p itself when rounding leaves nothing of that.
  int64_t replacement(int64_t step, int64_t drafted) {
    const Noise noise(seed_, position_ + step, Purpose::resample);
    const int64_t id = p_.draft_probs ? draw_residual(draft_probs(step), noise) : draw_.draw(noise, drafted);
    return id >= 0 ? id : draw_.draw(noise);
  }

  int64_t draw_residual(const float* q, const Noise& noise) {
    const TokenRow& row = draw_.row();
    Winner* winners = space_.winners.get<Winner>(row.tiles());
    spread_.run(row.tiles(), [&](int64_t t, int) { winners[t] = residual_tile(t, q, noise); });
    Winner best{-kInf, -1};
    for (int64_t t = 0; t < row.tiles(); ++t)
      if (winners[t].score > best.score) best = winners[t];
    return best.id;
  }

  Winner residual_tile(int64_t t, const float* q, const Noise& noise) const {
    const TokenRow& row = draw_.row();
    const Cut cut = draw_.kept().cut;
    const float temperature = filters_.greedy() ? 1.f : filters_.temperature, norm = float(1.0 / mass_);
    Winner best{-kInf, -1};
    for (int64_t i = row.begin(t); i < row.begin(t) + row.size(t); i += Noise::kBlock) {
      vf u[4];
      noise.block(i, u);
      for (int64_t j = 0; j < 4 && i + j * kLanes < row.n; ++j) {
        const int64_t at = i + j * kLanes;
        const vf x = load_n(row.x + at, int(row.n - at), -kInf);
        const vf p = select(cut.keeps(x, iota() + int32_t(at)), exp((x - row.max) / temperature) * norm, set1(0.f));
        const vf rest = p - load_n(q + at, int(row.n - at));
        const vf score = select(rest > set1(0.f), log(max(rest, set1(0x1p-126f))) + gumbel(u[j]), set1(-kInf));
        if (!any(score > set1(best.score))) continue;
        for (int lane = 0; lane < kLanes; ++lane)
          if (score[lane] > best.score) best = {score[lane], at + lane};
      }
    }
    return best;
  }

  const VerifyParams& p_;
  int64_t b_, vocab_, first_, length_, seed_, position_;
  const Spread& spread_;
  VerifySpace& space_;
  TokenDraw draw_;
  Filters filters_;
  double mass_ = 1;
};

void check_drafts(const VerifyParams& p) {
  const int64_t batch = p.cu_draft.size[0] - 1, total = p.draft_ids.size[0], room = p.ids.size[1];
  check_index("verify_draft", "cu_draft", 0, index_at(p.cu_draft, 0), 0, 1, "1");
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t begin = index_at(p.cu_draft, b), end = index_at(p.cu_draft, b + 1);
    check_index("verify_draft", "cu_draft", b + 1, end, begin, total + 1, "total_draft + 1");
    if (end - begin + 1 > room)
      fail("verify_draft: ids must have room for the longest draft and one more token (" + std::to_string(end - begin + 1) + "), got " +
           std::to_string(room) + " columns");
  }
  check_index("verify_draft", "cu_draft", batch, index_at(p.cu_draft, batch), total, total + 1, "total_draft + 1");
  for (int64_t i = 0; i < total; ++i)
    check_index("verify_draft", "draft_ids", i, index_at(p.draft_ids, i), 0, p.target_logits.size[1], "vocab");
}

}  // namespace

void verify_draft(const VerifyParams& p) {
  check_filters("verify_draft", p.temperature, p.top_p, p.min_p, p.positions);
  check_drafts(p);
  over_rows(p.cu_draft.size[0] - 1, p.target_logits.size[1], [&](int64_t begin, int64_t end, const Spread& spread) {
    static thread_local VerifySpace space;
    for (int64_t b = begin; b < end; ++b) RequestVerifier(p, b, spread, space).run();
  });
}

}  // namespace pk
