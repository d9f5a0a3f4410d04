// Sampling: bias, mask, penalties, filters and the draw of each row in one op; the random stream itself.
#include "kernels.h"
#include "logit_adjust.h"
#include "token_draw.h"

namespace pk {
namespace {

struct SampleSpace {
  Scratch raw, adjusted, settled, maxima, counts;
  int64_t counts_size = 0;
  DrawSpace draw;
  Collection top;

  int32_t* zeroed_counts(int64_t vocab) {
    if (vocab > counts_size) std::fill_n(counts.get<int32_t>(vocab), counts_size = vocab, 0);
    return counts.get<int32_t>(vocab);
  }
};

class RowSampler {
 public:
  RowSampler(const SampleParams& p, int64_t r, const Spread& spread, SampleSpace& space)
      : p_(p),
        r_(r),
        n_(p.logits.size[1]),
        spread_(spread),
        space_(space),
        draw_(spread, space.draw),
        filters_(Filters::of(p.temperature, p.top_k, p.top_p, p.min_p, r, n_)) {}

  void run() {
    const Noise noise(index_at(p_.seeds, r_), index_at(p_.positions, r_), Purpose::sample);
    raw_ = p_.logits.dtype == DType::f32 ? p_.logits.as<float>() + r_ * p_.logits.stride[0] : space_.raw.get<float>(n_);
    const Penalties penalties = Penalties::of(p_, r_);
    const bool penalised = !penalties.none() && (p_.prompt_ids || p_.output_ids);
    adjusts_ = p_.logit_bias || p_.allowed_mask || penalised;
    float* x = adjusts_ ? space_.adjusted.get<float>(n_) : nullptr;
    const int64_t tiles = (n_ + kTile - 1) / kTile;
    if (penalised) {  // penalties touch tokens anywhere, so the row is made before it is scanned
      spread_.run(tiles, [&](int64_t t, int) { prepare(t, x); });
      penalise(x, p_.prompt_ids, p_.output_ids, r_, penalties, space_.zeroed_counts(n_));
    }
    draw_.scan(x ? x : raw_, n_, filters_, &noise, [&](int64_t t) {
      if (!penalised) prepare(t, x);
      return p_.allowed_mask && std::isnan(largest_or_nan(raw_ + t * kTile, tile_size(t)));
    });
    int64_t id = -1;
    if (draw_.valid()) draw_.keep(), id = draw_.draw(noise);
    p_.ids.as<int64_t>()[r_ * p_.ids.stride[0]] = id;
    p_.valid.as<bool>()[r_ * p_.valid.stride[0]] = draw_.valid();
    if (p_.logprob) report(id);
  }

 private:
  int64_t tile_size(int64_t t) const { return std::min(kTile, n_ - t * kTile); }

  // A tile of the given logits to float32, then bias and mask.
  void prepare(int64_t t, float* x) {
    const int64_t begin = t * kTile, n = tile_size(t);
    visit_float(p_.logits.dtype, [&]<class T>() {
      if constexpr (!std::is_same_v<T, float>)
        widen(p_.logits.as<T>() + r_ * p_.logits.stride[0] + begin, const_cast<float*>(raw_) + begin, n);
    });
    if (!x) return;
    const float* bias = option_row<float>(p_.logit_bias, r_);
    const uint8_t* allowed = option_row<uint8_t>(p_.allowed_mask, r_);
    bias_and_mask(raw_ + begin, bias ? bias + begin : nullptr, allowed ? allowed + begin : nullptr, x + begin, n);
  }

  // Log-probabilities of the drawn token and of the first ones, of the given logits or of the kept distribution.
  void report(int64_t id) {
    const bool raw = p_.logprobs_mode == LogprobsMode::raw;
    const int64_t wanted = p_.top_ids ? p_.top_ids.size[1] : 0;
    float* logprob = p_.logprob.as<float>() + r_ * p_.logprob.stride[0];
    int64_t* top_ids = wanted ? p_.top_ids.as<int64_t>() + r_ * p_.top_ids.stride[0] : nullptr;
    float* top_logprobs = wanted ? p_.top_logprobs.as<float>() + r_ * p_.top_logprobs.stride[0] : nullptr;
    std::fill_n(top_ids, wanted, -1);
    std::fill_n(top_logprobs, wanted, draw_.valid() ? -kInf : kNan);
    *logprob = kNan;
    if (!draw_.valid()) return;

    const TokenRow row = raw ? raw_row() : draw_.row();
    const float temperature = raw || filters_.greedy() ? 1.f : filters_.temperature;
    const Cut cut = raw ? Cut{} : draw_.kept().cut;
    const double log_mass = std::log(draw_.mass(row, temperature, cut));
    auto log_p = [&](float x) { return float((double(x) - row.max) / temperature - log_mass); };
    *logprob = log_p(row.x[id]);
    if (wanted == 0) return;
    const Token* list = nullptr;
    space_.top.begin(wanted, spread_.workers());
    spread_.run(row.tiles(), [&](int64_t t, int worker) { space_.top.take(row, t, worker); });
    const int64_t n = space_.top.end(list);
    for (int64_t i = 0; i < n; ++i) {
      const float x = list[i].logit();
      if (!cut.keeps(x, list[i].id()) || (!raw && (x - row.max) / temperature < Filters::kSupport)) break;
      top_ids[i] = list[i].id(), top_logprobs[i] = log_p(x);
    }
  }

  // The given logits as a row of their own when they are not what was filtered.
  TokenRow raw_row() {
    if (draw_.row().x == raw_) return draw_.row();
    TokenRow row{raw_, n_, nullptr, 0};
    row.tile_max = space_.maxima.get<float>(row.tiles());
    auto scan = [&] {
      spread_.run(row.tiles(), [&](int64_t t, int) { row.tile_max[t] = largest_or_nan(row.tile(t), row.size(t)); });
      row.max = row_max(row);
    };
    scan();
    if (row.max == kInf) TokenDraw::settle(row, space_.settled), scan();
    return row;
  }

  const SampleParams& p_;
  int64_t r_, n_;
  const Spread& spread_;
  SampleSpace& space_;
  TokenDraw draw_;
  Filters filters_;
  const float* raw_ = nullptr;
  bool adjusts_ = false;
};

void check_history(const char* name, const Tensor& ids, int64_t vocab) {
  for (int64_t r = 0; ids && r < ids.size[0]; ++r) {
    const Tensor row = ids_of_row(ids, r);
    for (int64_t i = 0; i < row.size[0]; ++i) check_index("sample", name, r * row.size[0] + i, index_at(row, i), -1, vocab, "vocab");
  }
}

void check_penalty(const char* name, const Tensor& t, float above) {
  for (int64_t i = 0; t && i < t.size[0]; ++i)
    if (const float v = t.as<float>()[i * t.stride[0]]; !(v > above && v < kInf))
      fail(std::string("sample: ") + name + "[" + std::to_string(i) + "] must be " + (above == 0.f ? "above 0 and finite" : "finite") +
           ", got " + std::to_string(v));
}

}  // namespace

void sample(const SampleParams& p) {
  const int64_t vocab = p.logits.size[1];
  check_filters("sample", p.temperature, p.top_p, p.min_p, p.positions);
  check_penalty("repetition_penalty", p.repetition_penalty, 0.f);
  check_penalty("presence_penalty", p.presence_penalty, -kInf);
  check_penalty("frequency_penalty", p.frequency_penalty, -kInf);
  check_history("prompt_ids", p.prompt_ids, vocab);
  check_history("output_ids", p.output_ids, vocab);
  over_rows(p.logits.size[0], vocab, [&](int64_t begin, int64_t end, const Spread& spread) {
    static thread_local SampleSpace space;
    for (int64_t r = begin; r < end; ++r) RowSampler(p, r, spread, space).run();
  });
}

void philox_uniform(const PhiloxParams& p) {
  for (int64_t r = 0; r < p.positions.size[0]; ++r)
    check_index("philox_uniform", "positions", r, index_at(p.positions, r), 0, INT64_MAX, "2^63 - 1");
  const int64_t count = p.out.size[1];
  team().parallel_for(p.out.size[0], std::max<int64_t>(1, 4096 / std::max<int64_t>(1, count)), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const Noise noise(index_at(p.seeds, r), index_at(p.positions, r), Purpose::sample);
      float* out = p.out.as<float>() + r * p.out.stride[0];
      for (int64_t i = 0; i < count; i += Noise::kBlock) {
        vf u[4];
        noise.block(i, u);
        for (int64_t j = 0; j < 4 && i + j * kLanes < count; ++j) store_n(out + i + j * kLanes, u[j], int(count - i - j * kLanes));
      }
    }
  });
}

}  // namespace pk
