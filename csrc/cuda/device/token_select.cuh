// Finds where a prefix of the token order ends: 256 bins over an interval of tokens, the bin in which the count or the mass is
// reached becomes the next interval. At most eight passes, no sort; integer sums, so any order of addition gives the same bits.
#pragma once
#include "reduce.cuh"
#include "token_row.cuh"

namespace pk::device {

constexpr int kListedTokens = 4096;
constexpr float kLikely = 0x1p-14f;  // tokens less likely than this, against the first, seldom matter

struct SelectSpace {
  static constexpr int kBins = 256;
  unsigned counts[kBins], masses[kBins], carries[kBins];  // masses in two words: there is no 64-bit addition in shared memory
  uint64_t partial[32];
  uint64_t low, high, above;
  unsigned count, listed;
  uint64_t list[kListedTokens];
};

PK_DEVICE void add_to_bin(SelectSpace& s, int bin, bool by_mass, float weight) {
  atomicAdd(&s.counts[bin], 1u);
  if (!by_mass) return;
  const uint64_t mass = fixed_weight(weight);
  const auto low = static_cast<unsigned>(mass);
  const unsigned before = atomicAdd(&s.masses[bin], low), high = static_cast<unsigned>(mass >> 32) + (before + low < before);
  if (high) atomicAdd(&s.carries[bin], high);
}
PK_DEVICE uint64_t amount_in_bin(const SelectSpace& s, int bin, bool by_mass) {
  return by_mass ? uint64_t{s.carries[bin]} << 32 | s.masses[bin] : s.counts[bin];
}

// Warp 0: the bin, from the highest down, in which `target` is reached. Narrows [s.low, s.high] to it.
PK_DEVICE void narrow(SelectSpace& s, uint64_t low, uint64_t high, int shift, uint64_t above, bool by_mass, uint64_t target) {
  constexpr int kEach = SelectSpace::kBins / 32;
  const int lane = static_cast<int>(threadIdx.x), highest = SelectSpace::kBins - 1 - lane * kEach;
  uint64_t own = 0;
  for (int i = 0; i < kEach; i++) own += amount_in_bin(s, highest - i, by_mass);
  uint64_t until = own;
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t before = __shfl_up_sync(kFullWarp, until, static_cast<unsigned>(step));
    if (lane >= step) until += before;
  }
  const unsigned reached = __ballot_sync(kFullWarp, above + until >= target);
  if (lane != (reached ? __ffs(static_cast<int>(reached)) - 1 : 31)) return;
  uint64_t sum = above + until - own;
  int bin = highest;
  for (;; bin--) {
    const uint64_t amount = amount_in_bin(s, bin, by_mass);
    if (sum + amount >= target || bin == highest - kEach + 1) break;
    sum += amount;
  }
  s.low = low + (static_cast<uint64_t>(bin) << shift);
  const uint64_t end = s.low + ((uint64_t{1} << shift) - 1);
  s.high = end < high ? end : high;
  s.above = sum;
  s.count = s.counts[bin];
}

// The token at which the count or the mass of the candidates reaches `target`, which all of them together do. They lie in
// [low, high].
PK_DEVICE uint64_t last_token(const Candidates& c, uint64_t low, uint64_t high, bool by_mass, uint64_t target, SelectSpace& s) {
  uint64_t above = 0;
  for (;;) {
    const int bits = 64 - __clzll(static_cast<long long>(high - low)), shift = bits > 8 ? bits - 8 : 0;
    for (int i = static_cast<int>(threadIdx.x); i < SelectSpace::kBins; i += static_cast<int>(blockDim.x))
      s.counts[i] = s.masses[i] = s.carries[i] = 0;
    __syncthreads();
    c.each([&](uint64_t token, float weight) {
      if (token < low || token > high) return;
      add_to_bin(s, static_cast<int>((token - low) >> shift), by_mass, weight);
    });
    __syncthreads();
    if (threadIdx.x < 32) narrow(s, low, high, shift, above, by_mass, target);
    __syncthreads();
    low = s.low, high = s.high, above = s.above;
    if (shift == 0) return low;
    if (s.count == 1) break;
  }
  __syncthreads();
  c.each([&](uint64_t token, float) {
    if (token >= low && token <= high) s.low = token;
  });
  __syncthreads();
  return s.low;
}

struct Census {
  uint64_t count, mass, listed_mass, lowest;
};

// Counts the row's candidates and lists those of at least `floor` of the first one's weight, as far as there is room.
PK_DEVICE Census take_census(const Candidates& c, float floor, SelectSpace& s) {
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
  Census own{0, 0, 0, 0};
  uint64_t highest_complement = 0;  // of the lowest token
  c.each([&](uint64_t token, float weight) {
    own.count++;
    own.mass += fixed_weight(weight);
    highest_complement = ~token > highest_complement ? ~token : highest_complement;
    if (weight < floor) return;
    own.listed_mass += fixed_weight(weight);
    const unsigned place = atomicAdd(&s.listed, 1u);
    if (place < kListedTokens) s.list[place] = token;
  });
  return {sum_block(own.count, s.partial), sum_block(own.mass, s.partial), sum_block(own.listed_mass, s.partial),
          ~max_block(highest_complement, s.partial)};
}

// The smallest integer mass that reaches the share: at least 1, so that the first token stays.
PK_DEVICE uint64_t mass_target(float share, uint64_t mass) {
  const double wanted = ceil(static_cast<double>(share) * static_cast<double>(mass));
  if (!(wanted > 1.0)) return 1;
  return wanted < static_cast<double>(mass) ? static_cast<uint64_t>(wanted) : mass;
}

// Lists the candidates that decide about the first `count` tokens (0: by mass) and the share `top_p`, or leaves them in the row.
PK_DEVICE Census prepare(Candidates& c, uint64_t count, float top_p, SelectSpace& s) {
  Census all = take_census(c, kLikely, s);
  const bool enough = count ? count <= s.listed : top_p < 1.f && all.listed_mass >= mass_target(top_p, all.mass);
  bool fits = s.listed <= kListedTokens && (enough || s.listed == all.count);
  __syncthreads();
  if (!fits && all.count <= kListedTokens) {
    all = take_census(c, 0.f, s);
    fits = true;
  }
  if (fits) c.list = s.list, c.listed = static_cast<int>(s.listed);
  return all;
}

// Applies top-k (0: off) and top-p to the candidates; returns the mass of what is kept. `c.last` is the last of it.
PK_DEVICE uint64_t keep_prefix(Candidates& c, int top_k, float top_p, SelectSpace& s) {
  const uint64_t high = token_of(c.support.top, 0);
  const Census all = prepare(c, static_cast<uint64_t>(top_k), top_p, s);
  uint64_t low = all.lowest, mass = all.mass;
  auto measure = [&] {
    uint64_t own = 0;
    c.each([&](uint64_t, float weight) { own += fixed_weight(weight); });
    return sum_block(own, s.partial);
  };
  if (top_k > 0 && static_cast<uint64_t>(top_k) < all.count) {
    c.last = low = last_token(c, low, high, false, static_cast<uint64_t>(top_k), s);
    mass = measure();
  }
  if (top_p < 1.f) {
    c.last = last_token(c, low, high, true, mass_target(top_p, mass), s);
    mass = measure();
  }
  return mass;
}

// Gumbel-max over the candidates: the id, lowest on ties; -1 when there is none. Every thread gets it.
template <class Score>  // of (token, weight); -inf: out of the question
PK_DEVICE int race(const Candidates& c, Score score, uint64_t* partial) {
  uint64_t best = 0;
  c.each([&](uint64_t token, float weight) {
    const float own = score(token, weight);
    if (!(own > -INFINITY)) return;
    const uint64_t entry = token_of(own, id_of(token));
    best = entry > best ? entry : best;
  });
  best = max_block(best, partial);
  return best ? id_of(best) : -1;
}

}  // namespace pk::device
