// Gated activations: act(x[:, :width]) * x[:, width:].
#include "dispatch.h"
#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace pk {
namespace {

constexpr int64_t kSmallWork = 4096;  // elements below which waking the team costs more than the work

inline vf silu(vf g) { return g / (set1(1.f) + exp(-g)); }

// 0.5 g (1 + tanh(z)) = g / (1 + exp(-2 z)), which does not cancel for negative g. z = sqrt(2 / pi) (g + 0.044715 g^3).
inline vf gelu_tanh(vf g) {
  const vf z = set1(0.7978845608028654f) * fma(set1(0.044715f) * g, g * g, g);
  return g / (set1(1.f) + exp(z * set1(-2.f)));
}

template <Gate kKind, class X, class O>
void gate_row(const X* x, O* out, int64_t width) {
  const auto step = [&](int64_t i, int n) {
    const vf gate = load_n(x + i, n), up = load_n(x + width + i, n);
    store_n(out + i, (kKind == Gate::silu ? silu(gate) : gelu_tanh(gate)) * up, n);
  };
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) step(i, kLanes);
  if (i < width) step(i, int(width - i));
}

}  // namespace

void gated_activation(const GatedActivationParams& p) {
  const int64_t rows = p.x.size[0], width = p.out.size[1];
  visit_float(p.x.dtype, [&]<class X>() {
    visit_float(p.out.dtype, [&]<class O>() {
      team().parallel_for(rows, kSmallWork / std::max<int64_t>(width, 1), [&](int64_t begin, int64_t end, int) {
        const auto row = p.kind == Gate::silu ? gate_row<Gate::silu, X, O> : gate_row<Gate::gelu_tanh, X, O>;
        for (int64_t r = begin; r < end; ++r) row(p.x.as<X>() + r * p.x.stride[0], p.out.as<O>() + r * p.out.stride[0], width);
      });
    });
  });
}

}  // namespace pk
