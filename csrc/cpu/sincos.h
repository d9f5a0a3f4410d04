// Sine and cosine of float32 angles, within about one unit in the last place for |x| up to 10^6 and beyond.
#pragma once
#include "simd.h"

namespace pk {

// x = n pi/2 + r is split in double, where the products are exact enough that r keeps all its bits; then the polynomials
// of the Cephes library on |r| <= pi/4. NaN and infinities give NaN.
inline void sincos(vf x, vf& sine, vf& cosine) {
  typedef double vd __attribute__((vector_size(8 * kLanes)));
  constexpr double kHalfPiHigh = 0x1.921fb544p+0, kHalfPiLow = 0x1.0b4611a626331p-34;  // the high part has 33 bits
  const vd wide = __builtin_convertvector(x, vd);
  const vd n = __builtin_convertvector(__builtin_convertvector(wide * 0.63661977236758134308 + 6755399441055744.0 - 6755399441055744.0, vi), vd);
  const vf r = __builtin_convertvector((wide - n * kHalfPiHigh) - n * kHalfPiLow, vf);
  const vi quadrant = __builtin_convertvector(n, vi);

  const vf z = r * r;
  vf s = set1(-1.9515295891e-4f);
  s = fma(s, z, set1(8.3321608736e-3f));
  s = fma(s, z, set1(-1.6666654611e-1f));
  s = fma(s * z, r, r);
  vf c = set1(2.443315711809948e-5f);
  c = fma(c, z, set1(-1.388731625493765e-3f));
  c = fma(c, z, set1(4.166664568298827e-2f));
  c = fma(c * z, z, fma(set1(-0.5f), z, set1(1.f)));

  const vi swap = -(quadrant & 1), sine_sign = (quadrant & 2) << 30, cosine_sign = ((quadrant + 1) & 2) << 30;
  sine = as_f(as_i(select(swap, c, s)) ^ sine_sign);
  cosine = as_f(as_i(select(swap, s, c)) ^ cosine_sign);
}

}  // namespace pk
