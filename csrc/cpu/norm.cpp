// RMS normalisation: y = x / sqrt(mean(x^2) + eps) * weight, over x + residual when there is one.
#include "dispatch.h"
#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace pk {
namespace {

constexpr int64_t kGrain = 4;             // rows below which waking the team costs more than the work
constexpr int kChains = 16 / kLanes * 4;  // partial sums of squares: 64 numbers at every level, so that long rows stay accurate

// Writes the row's (summed) values to `sum` as float32 and returns the sum of their squares.
template <class X>
float sum_row(const X* x, const X* residual, X* sum_out, int64_t n, float* sum) {
  vf squares[kChains] = {};
  const auto step = [&](int64_t i, int lanes, vf& chain) {
    vf v = load_n(x + i, lanes);
    if (residual) v += load_n(residual + i, lanes);
    if (sum_out) {
      store_n(sum_out + i, v, lanes);
      v = load_n(sum_out + i, lanes);  // normalise what was stored
    }
    store_n(sum + i, v, lanes);
    chain = fma(v, v, chain);
  };
  int64_t i = 0;
  for (; i + kChains * kLanes <= n; i += kChains * kLanes)
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) step(i + c * kLanes, kLanes, squares[c]);
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c)
    if (i + c * kLanes < n) step(i + c * kLanes, int(n - i - c * kLanes), squares[c]);
  for (int c = 1; c < kChains; ++c) squares[0] += squares[c];
  return reduce_add(squares[0]);
}

template <class X, class W, class O>
void norm_row(const X* x, const X* residual, X* sum_out, const W* weight, O* out, int64_t n, float eps, float* sum) {
  const vf scale = set1(1.f / std::sqrt(sum_row(x, residual, sum_out, n, sum) / float(n) + eps));
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(sum + i) * scale * load(weight + i));
  if (i < n) store_n(out + i, load_n(sum + i, int(n - i)) * scale * load_n(weight + i, int(n - i)), int(n - i));
}

}  // namespace

void rms_norm(const RmsNormParams& p) {
  const int64_t rows = p.x.size[0], n = p.x.size[1];
  visit_float(p.x.dtype, [&]<class X>() {
    visit_float(p.weight.dtype, [&]<class W>() {
      visit_float(p.out.dtype, [&]<class O>() {
        team().parallel_for(rows, kGrain, [&](int64_t begin, int64_t end, int) {
          static thread_local Scratch scratch;
          float* sum = scratch.get<float>(n);
          for (int64_t r = begin; r < end; ++r)
            norm_row(p.x.as<X>() + r * p.x.stride[0], p.residual ? p.residual.as<X>() + r * p.residual.stride[0] : nullptr,
                     p.residual_out ? p.residual_out.as<X>() + r * p.residual_out.stride[0] : nullptr, p.weight.as<W>(),
                     p.out.as<O>() + r * p.out.stride[0], n, float(p.eps), sum);
        });
      });
    });
  });
}

}  // namespace pk
