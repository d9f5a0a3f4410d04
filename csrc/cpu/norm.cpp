// RMS normalisation: y = x / sqrt(mean(x^2) + eps) * weight, over x + residual when there is one.
#include "dispatch.h"
#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace pk {
namespace {

constexpr int64_t kGrain = 4;             // rows below which waking the team costs more than the work
constexpr int kChains = 16 / kLanes * 4;  // partial sums of squares: 64 numbers at every level, so that long rows stay accurate

template <class X, class W, class O>
void norm_row(const X* x, const X* residual, X* sum_out, const W* weight, O* out, int64_t n, float eps, float* sum) {
  vf squares[kChains] = {};
  int chain = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int lanes = int(n - i);
    vf v = load_n(x + i, lanes);
    if (residual) v += load_n(residual + i, lanes);
    if (sum_out) {
      store_n(sum_out + i, v, lanes);
      v = load_n(sum_out + i, lanes);  // normalise what was stored
    }
    store_n(sum + i, v, lanes);
    squares[chain] = fma(v, v, squares[chain]);
    chain = (chain + 1) % kChains;
  }
  for (int c = 1; c < kChains; ++c) squares[0] += squares[c];
  const vf scale = set1(1.f / std::sqrt(reduce_add(squares[0]) / float(n) + eps));
  for (int64_t i = 0; i < n; i += kLanes) {
    const int lanes = int(n - i);
    store_n(out + i, load_n(sum + i, lanes) * scale * load_n(weight + i, lanes), lanes);
  }
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
