// Rotary position embedding of one head. The rope op and the append that rotates both use it, so they agree bit for bit.
#pragma once
#include "simd.h"

namespace pk {

typedef double vd __attribute__((vector_size(8 * kLanes)));
typedef int64_t vl __attribute__((vector_size(8 * kLanes)));

// sin and cos of a float32 angle, each right to the last bit or nearly so. The work is in double: a float32 reduction of
// an angle of a few thousand radians (the first pair of a long context) would lose three digits.
inline void sincos(vf angle, vf& sine, vf& cosine) {
  constexpr double kMagic = 0x1.8p52;  // adding it rounds to an integer that can be read from the low bits
  const vd x = __builtin_convertvector(angle, vd);
  const vd shifted = x * 0.63661977236758134308 + kMagic, n = shifted - kMagic;
  const vd r = (x - n * 0x1.921fb54000000p0) - n * 0x1.10b4611a62633p-30;  // pi/2; the first product is exact
  const vd z = r * r;
  vd s = z * -2.5052108385441720e-8 + 2.7557319223985893e-6;
  s = s * z + -1.9841269841269841e-4;
  s = s * z + 8.3333333333333332e-3;
  s = s * z + -1.6666666666666666e-1;
  s = s * z * r + r;
  vd c = z * -2.7557319223985888e-7 + 2.4801587301587302e-5;
  c = c * z + -1.3888888888888889e-3;
  c = c * z + 4.1666666666666664e-2;
  c = c * z + -0.5;
  c = c * z + 1.0;
  const vl quadrant = (vl)shifted, odd = (quadrant & 1) != 0;
  const vd first = odd ? c : s, second = odd ? s : c;
  sine = __builtin_convertvector((quadrant & 2) != 0 ? -first : first, vf);
  cosine = __builtin_convertvector(((quadrant + 1) & 2) != 0 ? -second : second, vf);
}

// cos and sin of position * inv_freq[p] (a float32 product), each times `scale`, for every pair p. The two arrays need
// room for a whole last vector: see padded_pairs.
inline int64_t padded_pairs(int64_t pairs) { return (pairs + kLanes - 1) / kLanes * kLanes; }
inline void rotation(float position, const float* inv_freq, int64_t pairs, float scale, float* cosines, float* sines) {
  for (int64_t p = 0; p < pairs; p += kLanes) {
    vf s, c;
    sincos(set1(position) * load_n(inv_freq + p, int(pairs - p)), s, c);
    store(cosines + p, c * scale);
    store(sines + p, s * scale);
  }
}

// Rotates the first 2 * pairs elements and copies the rest; `out` may be `x`.
// Pair p is elements (p, p + pairs): (a, b) -> (a cos - b sin, b cos + a sin).
template <class X, class O>
void rotate_halves(const X* x, O* out, const float* cosines, const float* sines, int64_t pairs) {
  for (int64_t p = 0; p < pairs; p += kLanes) {
    const int n = int(pairs - p);
    const vf a = load_n(x + p, n), b = load_n(x + pairs + p, n), c = load(cosines + p), s = load(sines + p);
    store_n(out + p, a * c - b * s, n);
    store_n(out + pairs + p, b * c + a * s, n);
  }
}

// Pair p is elements (2p, 2p + 1).
template <class X, class O>
void rotate_interleaved(const X* x, O* out, const float* cosines, const float* sines, int64_t pairs) {
  const vi even = iota() * 2, odd = even + 1;
  const vi low = (iota() >> 1) + (iota() & 1) * kLanes, high = low + kLanes / 2;
  for (int64_t p = 0; p < pairs; p += kLanes) {
    const int64_t n = 2 * (pairs - p);
    const vf u = load_n(x + 2 * p, int(n)), v = n > kLanes ? load_n(x + 2 * p + kLanes, int(n - kLanes)) : set1(0.f);
    const vf a = __builtin_shuffle(u, v, even), b = __builtin_shuffle(u, v, odd), c = load(cosines + p), s = load(sines + p);
    const vf first = a * c - b * s, second = b * c + a * s;
    store_n(out + 2 * p, __builtin_shuffle(first, second, low), int(n));
    if (n > kLanes) store_n(out + 2 * p + kLanes, __builtin_shuffle(first, second, high), int(n - kLanes));
  }
}

template <class X, class O>
void rotate_head(const X* x, O* out, const float* cosines, const float* sines, int64_t pairs, int64_t head_dim, bool interleaved) {
  if (interleaved)
    rotate_interleaved(x, out, cosines, sines, pairs);
  else
    rotate_halves(x, out, cosines, sines, pairs);
  if (static_cast<const void*>(x) == static_cast<const void*>(out)) return;
  for (int64_t i = 2 * pairs; i < head_dim; ++i) out[i] = from_float<O>(to_float(x[i]));
}

}  // namespace pk
