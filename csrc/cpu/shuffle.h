// Moves between lanes of several vectors: transposes, and reductions of many rows at once. One source for every width,
// since each step is a two-operand shuffle that the compiler turns into one instruction where there is one.
#pragma once
#include <utility>

#include "simd.h"

namespace pk {

// Lane i of the result is lane Index(i) of a (0 .. kLanes - 1) or of b (from kLanes).
template <auto Index, class V, int... I>
inline V shuffle(V a, V b, std::integer_sequence<int, I...>) {
  return __builtin_shuffle(a, b, vi{Index(I)...});
}
template <auto Index, class V>
inline V shuffle(V a, V b) {
  return shuffle<Index>(a, b, std::make_integer_sequence<int, kLanes>());
}

// Within each 128 bits: two lanes of a, then two of b. Odd picks lanes 1 and 3, even 0 and 2.
template <int Odd>
inline vf pick_lanes(vf a, vf b) {
  return shuffle<[](int i) { return (i & ~3) + Odd + (i & 1) * 2 + ((i & 2) ? kLanes : 0); }>(a, b);
}
// Every second 128-bit quarter of a, then of b.
template <int Odd>
inline vf pick_quarters(vf a, vf b) {
  return shuffle<[](int i) {
    const int quarter = 2 * (i / 4) + Odd;  // counted through a, then b
    return quarter * 4 + i % 4;
  }>(a, b);
}

// Of 2 kLanes 16-bit numbers each: pairs (a_i, b_i), a in the low half, the first kLanes of them and the rest.
inline void interleave_halves(vu a, vu b, vu& first, vu& second) {
  const auto pick = [&]<int... I>(int from, std::integer_sequence<int, I...>) {
    return (vu)__builtin_shuffle((vh_pair)a, (vh_pair)b, vh_pair{uint16_t(from + I / 2 + (I % 2 ? 2 * kLanes : 0))...});
  };
  first = pick(0, std::make_integer_sequence<int, 2 * kLanes>());
  second = pick(kLanes, std::make_integer_sequence<int, 2 * kLanes>());
}

// Lane i of the result is op over the lanes of rows[i], for the first Rows of them, always in the same tree. Overwrites rows.
template <int Rows, class Op>
inline vf reduce_rows(vf* rows, Op op) {
  static_assert(Rows >= 4 && Rows <= kLanes);
#pragma GCC unroll 2
  for (int n = Rows / 2; n >= Rows / 4; n /= 2)
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) rows[i] = op(pick_lanes<0>(rows[2 * i], rows[2 * i + 1]), pick_lanes<1>(rows[2 * i], rows[2 * i + 1]));
  int left = Rows / 4;  // vectors; when only one is, it meets itself
#pragma GCC unroll 4
  for (int quarters = kLanes / 4; quarters > 1; quarters /= 2, left = (left + 1) / 2)
#pragma GCC unroll 16
    for (int i = 0; 2 * i < left; ++i) {
      const vf a = rows[2 * i], b = rows[left > 1 ? 2 * i + 1 : 0];
      rows[i] = op(pick_quarters<0>(a, b), pick_quarters<1>(a, b));
    }
  return rows[0];
}
template <int Rows = kLanes>
inline vf add_rows(vf* rows) {
  return reduce_rows<Rows>(rows, [](vf a, vf b) { return a + b; });
}
template <int Rows = kLanes>
inline vf max_rows(vf* rows) {
  return reduce_rows<Rows>(rows, [](vf a, vf b) { return max(a, b); });
}

// Lane j of rows[i] goes to lane i of rows[j].
inline void transpose(vu* rows) {
  constexpr auto low = [](int i) { return (i & ~3) + ((i & 3) >> 1) + ((i & 1) ? kLanes : 0); };
  constexpr auto high = [](int i) { return (i & ~3) + 2 + ((i & 3) >> 1) + ((i & 1) ? kLanes : 0); };
  constexpr auto low_pair = [](int i) { return (i & ~3) + (i & 1) + ((i & 2) ? kLanes : 0); };
  constexpr auto high_pair = [](int i) { return (i & ~3) + 2 + (i & 1) + ((i & 2) ? kLanes : 0); };
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {  // 4 x 4 inside each 128 bits
    const vu a = shuffle<low>(rows[i], rows[i + 1]), b = shuffle<high>(rows[i], rows[i + 1]);
    const vu c = shuffle<low>(rows[i + 2], rows[i + 3]), d = shuffle<high>(rows[i + 2], rows[i + 3]);
    rows[i] = shuffle<low_pair>(a, c), rows[i + 1] = shuffle<high_pair>(a, c);
    rows[i + 2] = shuffle<low_pair>(b, d), rows[i + 3] = shuffle<high_pair>(b, d);
  }
  if constexpr (kLanes == 8) {
    constexpr auto halves = [](int i) { return i < 4 ? i : i - 4 + kLanes; };
    constexpr auto other_halves = [](int i) { return i < 4 ? i + 4 : i + kLanes; };
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const vu a = rows[i], b = rows[i + 4];
      rows[i] = shuffle<halves>(a, b), rows[i + 4] = shuffle<other_halves>(a, b);
    }
  } else if constexpr (kLanes == 16) {
    constexpr auto even = [](int i) { return 8 * (i / 4) + i % 4; };     // quarters 0, 2 of a, then of b
    constexpr auto odd = [](int i) { return 8 * (i / 4) + 4 + i % 4; };  // quarters 1, 3
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const vu a = shuffle<even>(rows[i], rows[i + 4]), b = shuffle<odd>(rows[i], rows[i + 4]);
      const vu c = shuffle<even>(rows[i + 8], rows[i + 12]), d = shuffle<odd>(rows[i + 8], rows[i + 12]);
      rows[i] = shuffle<even>(a, c), rows[i + 8] = shuffle<odd>(a, c);
      rows[i + 4] = shuffle<even>(b, d), rows[i + 12] = shuffle<odd>(b, d);
    }
  }
}

}  // namespace pk
