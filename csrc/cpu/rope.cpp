// Rotary position embedding: pair (a, b) of the token at position t turns by the angle t x inv_freq.
#include "dispatch.h"
#include "kernels.h"
#include "simd.h"
#include "sincos.h"
#include "threads.h"

namespace pk {
namespace {

constexpr int64_t kGrain = 4;  // tokens below which waking the team costs more than the work

// Cosines and sines of one token: [pairs] each; interleaved, [2 * pairs] each, every value twice and sines signed -, +.
struct Angles {
  float *cos, *sin;

  void compute(const RotaryParams& p, int64_t token) const {
    const int64_t pairs = p.inv_freq.size[0];
    const vf position = set1(float(index_at(p.positions, token))), scale = set1(float(p.rope_scale));
    for (int64_t i = 0; i < pairs; i += kLanes) {
      vf s, c;
      sincos(position * load_n(p.inv_freq.as<float>() + i, int(pairs - i)), s, c);
      store_n(sin + i, s * scale, int(pairs - i));
      store_n(cos + i, c * scale, int(pairs - i));
    }
    if (!p.interleaved) return;
    for (int64_t i = pairs - 1; i >= 0; --i) {
      const float s = sin[i], c = cos[i];
      sin[2 * i] = -s, sin[2 * i + 1] = s;
      cos[2 * i] = cos[2 * i + 1] = c;
    }
  }
};

template <class X, class O>
void rotate_halves(const X* x, O* out, int64_t pairs, const Angles& angles) {
  for (int64_t i = 0; i < pairs; i += kLanes) {
    const int n = int(pairs - i);
    const vf a = load_n(x + i, n), b = load_n(x + pairs + i, n), c = load_n(angles.cos + i, n), s = load_n(angles.sin + i, n);
    store_n(out + i, fma(a, c, -(b * s)), n);
    store_n(out + pairs + i, fma(a, s, b * c), n);
  }
}

template <class X, class O>
void rotate_neighbours(const X* x, O* out, int64_t pairs, const Angles& angles) {
  const vi partner = iota() ^ 1;
  for (int64_t i = 0; i < 2 * pairs; i += kLanes) {
    const int n = int(2 * pairs - i);
    const vf v = load_n(x + i, n), other = __builtin_shuffle(v, partner);
    store_n(out + i, fma(v, load_n(angles.cos + i, n), other * load_n(angles.sin + i, n)), n);
  }
}

template <class X, class O>
void rotate_heads(const Tensor& in, const Tensor& out, int64_t token, int64_t pairs, bool interleaved, const Angles& angles) {
  const int64_t head_dim = in.size[2];
  for (int64_t h = 0; h < in.size[1]; ++h) {
    const X* x = in.as<X>() + token * in.stride[0] + h * in.stride[1];
    O* o = out.as<O>() + token * out.stride[0] + h * out.stride[1];
    if (interleaved) rotate_neighbours(x, o, pairs, angles);
    else rotate_halves(x, o, pairs, angles);
    for (int64_t i = 2 * pairs; i < head_dim; i += kLanes) store_n(o + i, load_n(x + i, int(head_dim - i)), int(head_dim - i));
  }
}

void rotate(const Tensor& in, const Tensor& out, int64_t token, const RotaryParams& p, const Angles& angles) {
  visit_float(in.dtype, [&]<class X>() {
    visit_float(out.dtype, [&]<class O>() { rotate_heads<X, O>(in, out, token, p.inv_freq.size[0], p.interleaved, angles); });
  });
}

}  // namespace

void rotary_embedding(const RotaryParams& p) {
  const int64_t room = 2 * p.inv_freq.size[0];
  team().parallel_for(p.q.size[0], kGrain, [&](int64_t begin, int64_t end, int) {
    static thread_local Scratch scratch;
    float* buffer = scratch.get<float>(2 * room);
    const Angles angles{buffer, buffer + room};
    for (int64_t t = begin; t < end; ++t) {
      angles.compute(p, t);
      rotate(p.q, p.q_out, t, p, angles);
      rotate(p.k, p.k_out, t, p, angles);
    }
  });
}

}  // namespace pk
