// Rotary position embedding of queries and keys: angles once per token, used by all its heads.
#include "dispatch.h"
#include "kernels.h"
#include "rotate.h"
#include "threads.h"

namespace pk {
namespace {

constexpr int64_t kGrain = 4;  // tokens below which waking the team costs more than the work

void rotate(const Tensor& in, const Tensor& out, int64_t token, const float* cosines, const float* sines, int64_t pairs, bool interleaved) {
  visit_float(in.dtype, [&]<class X>() {
    visit_float(out.dtype, [&]<class O>() {
      for (int64_t h = 0; h < in.size[1]; ++h)
        rotate_head(in.as<X>() + token * in.stride[0] + h * in.stride[1], out.as<O>() + token * out.stride[0] + h * out.stride[1], cosines,
                    sines, pairs, in.size[2], interleaved);
    });
  });
}

}  // namespace

void rotary_embedding(const RotaryParams& p) {
  const int64_t pairs = p.inv_freq.size[0], room = padded_pairs(pairs);
  team().parallel_for(p.q.size[0], kGrain, [&](int64_t begin, int64_t end, int) {
    static thread_local Scratch scratch;
    float *cosines = scratch.get<float>(2 * room), *sines = cosines + room;
    for (int64_t t = begin; t < end; ++t) {
      rotation(float(index_at(p.positions, t)), p.inv_freq.as<float>(), pairs, float(p.rope_scale), cosines, sines);
      rotate(p.q, p.q_out, t, cosines, sines, pairs, p.interleaved);
      rotate(p.k, p.k_out, t, cosines, sines, pairs, p.interleaved);
    }
  });
}

}  // namespace pk
