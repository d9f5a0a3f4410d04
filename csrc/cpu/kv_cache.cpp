// Paged KV cache: append (convert or quantise; with rotation of q and k), gather (dequantise), copy and swap pages.
#include <algorithm>
#include <vector>

#include "denormals.h"
#include "indices.h"
#include "kernels.h"
#include "kv_codes.h"
#include "rotate.h"
#include "threads.h"

namespace pk {
namespace {

constexpr int64_t kGrainElements = 1 << 14;  // below this much work waking the team costs more than it saves

int64_t grain_of(int64_t elements_per_token) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements_per_token)); }

// One of the two caches, with its scales, and how a token's rows get in.
struct Pool {
  Tensor cache, scale;

  int64_t row(int64_t slot, int64_t head) const {
    const int64_t page = slot / cache.size[1], offset = slot % cache.size[1];
    return page * cache.stride[0] + offset * cache.stride[1] + head * cache.stride[2];
  }
  bool dynamic() const { return scale.ndim == 3; }
  float* scale_at(int64_t slot, int64_t head) const {
    if (!dynamic()) return scale.as<float>() + (scale.ndim == 1 ? head * scale.stride[0] : 0);
    const int64_t page = slot / scale.size[1], offset = slot % scale.size[1];
    return scale.as<float>() + page * scale.stride[0] + offset * scale.stride[1] + head * scale.stride[2];
  }
};

// One token: a row per kv head, `head_stride` elements of X apart.
using StoreToken = void (*)(const void* rows, int64_t head_stride, const Pool& pool, int64_t slot);

template <class X, class C>
void store_token(const void* rows, int64_t head_stride, const Pool& pool, int64_t slot) {
  const int64_t heads = pool.cache.size[2], n = pool.cache.size[3];
  for (int64_t h = 0; h < heads; ++h) {
    const X* x = static_cast<const X*>(rows) + h * head_stride;
    C* to = pool.cache.as<C>() + pool.row(slot, h);
    if constexpr (is_code<C>) {
      float* scale = pool.scale_at(slot, h);
      if (pool.dynamic()) *scale = dynamic_scale<C>(x, n);
      encode_row(x, to, n, *scale);
    } else {
      convert_row(x, to, n);
    }
  }
}

StoreToken store_token_for(DType x, DType cache) {
  StoreToken chosen = nullptr;
  visit_float(x, [&]<class X>() { visit_cache(cache, [&]<class C>() { chosen = store_token<X, C>; }); });
  return chosen;
}

void check_slots(const char* op, const Tensor& slots, const Tensor& cache) {
  const int64_t capacity = cache.size[0] * cache.size[1], *slot = slots.as<int64_t>();
  for (int64_t t = 0; t < slots.size[0]; ++t)
    if (slot[t * slots.stride[0]] >= capacity)
      check_index(op, "slot_mapping", t, slot[t * slots.stride[0]], 0, capacity, "num_pages * page_size");
}

const char* element(const Tensor& t, int64_t offset) { return t.as<char>() + offset * size_of(t.dtype); }

// Angles of one token, shared by its heads.
struct Angles {
  const float *cosines, *sines;
  int64_t pairs;
  bool interleaved;
};

using RotateToken = void (*)(const void* x, int64_t x_head_stride, void* out, int64_t out_head_stride, int64_t heads, int64_t head_dim,
                             const Angles&);

template <class X, class O>
void rotate_token(const void* x, int64_t x_stride, void* out, int64_t out_stride, int64_t heads, int64_t head_dim, const Angles& a) {
  for (int64_t h = 0; h < heads; ++h)
    rotate_head(static_cast<const X*>(x) + h * x_stride, static_cast<O*>(out) + h * out_stride, a.cosines, a.sines, a.pairs, head_dim,
                a.interleaved);
}

RotateToken rotate_token_for(DType x, DType out) {
  RotateToken chosen = nullptr;
  visit_float(x, [&]<class X>() { visit_float(out, [&]<class O>() { chosen = rotate_token<X, O>; }); });
  return chosen;
}

// One page, laid out with the strides of `source`, into one with those of `target`.
void copy_page(const Tensor& source, const char* from, const Tensor& target, char* to) {
  const int64_t bytes = size_of(source.dtype), row = source.ndim == 4 ? source.size[3] * bytes : bytes;
  for (int64_t i = 0; i < source.size[1]; ++i)
    for (int64_t h = 0; h < source.size[2]; ++h)
      std::memcpy(to + (i * target.stride[1] + h * target.stride[2]) * bytes, from + (i * source.stride[1] + h * source.stride[2]) * bytes,
                  row);
}

// Fails unless every source and destination exists and no destination comes twice. Returns the destinations, sorted.
std::vector<int64_t> check_copies(const char* op, const Tensor& src, const Tensor& dst, int64_t src_count, const char* src_bound,
                                  int64_t dst_count, const char* dst_bound) {
  std::vector<int64_t> written(src.size[0]);
  for (int64_t i = 0; i < src.size[0]; ++i) {
    check_index(op, "src_pages", i, index_at(src, i), 0, src_count, src_bound);
    check_index(op, "dst_pages", i, written[i] = index_at(dst, i), 0, dst_count, dst_bound);
  }
  std::sort(written.begin(), written.end());
  const auto twice = std::adjacent_find(written.begin(), written.end());
  if (twice != written.end())
    fail(std::string(op) + ": dst_pages must not repeat a page, got " + std::to_string(*twice) + " more than once");
  return written;
}

// The bytes that a page's rows span, from its first to past its last.
int64_t page_span(const Tensor& pool) {
  int64_t last = 0;
  for (int d = 1; d < pool.ndim; ++d) last += (pool.size[d] - 1) * pool.stride[d];
  return (last + 1) * size_of(pool.dtype);
}

}  // namespace

void append_kv(const AppendParams& p) {
  check_slots("append_kv", p.slot_mapping, p.k_cache);
  const Pool k{p.k_cache, p.k_scale}, v{p.v_cache, p.v_scale};
  const StoreToken store_k = store_token_for(p.k.dtype, p.k_cache.dtype), store_v = store_token_for(p.v.dtype, p.v_cache.dtype);
  const int64_t elements = p.k.size[1] * (p.k.size[2] + p.v.size[2]);
  team().parallel_for(p.k.size[0], grain_of(elements), [&](int64_t begin, int64_t end, int) {
    const Denormals kept(true);  // scales and codes are defined on all of float32
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = p.slot_mapping.as<int64_t>()[t * p.slot_mapping.stride[0]];
      if (slot < 0) continue;  // padding
      store_k(element(p.k, t * p.k.stride[0]), p.k.stride[1], k, slot);
      store_v(element(p.v, t * p.v.stride[0]), p.v.stride[1], v, slot);
    }
  });
}

void rope_append_kv(const RopeAppendParams& p) {
  check_slots("rope_append_kv", p.slot_mapping, p.k_cache);
  for (int64_t t = 0; t < p.positions.size[0]; ++t)
    check_index("rope_append_kv", "positions", t, index_at(p.positions, t), 0, INT64_MAX, "2^63 - 1");
  const Pool k{p.k_cache, p.k_scale}, v{p.v_cache, p.v_scale};
  const StoreToken store_k = store_token_for(p.k.dtype, p.k_cache.dtype), store_v = store_token_for(p.v.dtype, p.v_cache.dtype);
  const RotateToken rotate_q = rotate_token_for(p.q.dtype, p.q_out.dtype), rotate_k = rotate_token_for(p.k.dtype, p.k.dtype);
  const int64_t pairs = p.inv_freq.size[0], padded = padded_pairs(pairs), heads = p.k.size[1], dim = p.k.size[2];
  const int64_t elements = p.q.size[1] * dim + heads * (dim + p.v.size[2]);
  team().parallel_for(p.k.size[0], grain_of(elements), [&](int64_t begin, int64_t end, int) {
    static thread_local Scratch scratch;
    float* cosines = scratch.get<float>(2 * padded + heads * dim);
    float *sines = cosines + padded, *rotated = sines + padded;  // k is rounded to its own type, as the two ops apart would
    const Denormals kept(true);
    for (int64_t t = begin; t < end; ++t) {
      rotation(float(index_at(p.positions, t)), p.inv_freq.as<float>(), pairs, float(p.rope_scale), cosines, sines);
      const Angles angles{cosines, sines, pairs, p.interleaved};
      rotate_q(element(p.q, t * p.q.stride[0]), p.q.stride[1], const_cast<char*>(element(p.q_out, t * p.q_out.stride[0])),
               p.q_out.stride[1], p.q.size[1], dim, angles);
      const int64_t slot = p.slot_mapping.as<int64_t>()[t * p.slot_mapping.stride[0]];
      if (slot < 0) continue;
      rotate_k(element(p.k, t * p.k.stride[0]), p.k.stride[1], rotated, dim, heads, dim, angles);
      store_k(rotated, dim, k, slot);
      store_v(element(p.v, t * p.v.stride[0]), p.v.stride[1], v, slot);
    }
  });
}

namespace {

template <class C, class O>
void gather_token(const Pool& pool, int64_t slot, const Tensor& out, int64_t token) {
  for (int64_t h = 0; h < out.size[1]; ++h) {
    const C* from = pool.cache.as<C>() + pool.row(slot, h);
    O* to = out.as<O>() + token * out.stride[0] + h * out.stride[1];
    if constexpr (is_code<C>)
      decode_row(from, to, out.size[2], *pool.scale_at(slot, h));
    else
      convert_row(from, to, out.size[2]);
  }
}

// Where each sequence starts among the gathered tokens: [batch + 1]. Checks everything that the gather will follow.
std::vector<int64_t> gather_starts(const GatherParams& p) {
  std::vector<int64_t> starts(p.seqlens_k.size[0] + 1);
  for (int64_t b = 0; b < p.seqlens_k.size[0]; ++b) {
    check_pages("gather_kv", p.block_table, p.seqlens_k, b, p.k_cache.size[0], p.k_cache.size[1]);
    starts[b + 1] = starts[b] + index_at(p.seqlens_k, b);
  }
  if (starts.back() != p.k.size[0])
    fail("gather_kv: k and v must have sum(seqlens_k) rows (" + std::to_string(starts.back()) + "), got " + std::to_string(p.k.size[0]));
  return starts;
}

}  // namespace

void gather_kv(const GatherParams& p) {
  const std::vector<int64_t> starts = gather_starts(p);
  const Pool k{p.k_cache, p.k_scale}, v{p.v_cache, p.v_scale};
  const int64_t page_size = p.k_cache.size[1], elements = p.k.size[1] * (p.k.size[2] + p.v.size[2]);
  visit_cache(p.k_cache.dtype, [&]<class C>() {
    visit_float(p.k.dtype, [&]<class O>() {
      team().parallel_for(p.k.size[0], grain_of(elements), [&](int64_t begin, int64_t end, int) {
        const Denormals kept(true);
        int64_t b = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
        for (int64_t t = begin; t < end; ++t) {
          while (t >= starts[b + 1]) ++b;
          const int64_t at = t - starts[b], page = p.block_table.as<int32_t>()[b * p.block_table.stride[0] + at / page_size];
          const int64_t slot = page * page_size + at % page_size;
          gather_token<C, O>(k, slot, p.k, t);
          gather_token<C, O>(v, slot, p.v, t);
        }
      });
    });
  });
}

void copy_pages(const CopyPagesParams& p) {
  const int64_t copies = p.src_pages.size[0], pages = p.k_cache.size[0];
  const std::vector<int64_t> written = check_copies("copy_pages", p.src_pages, p.dst_pages, pages, "num_pages", pages, "num_pages");
  bool overlap = false;  // a page that is written is also read: then every source is read before any is written
  for (int64_t i = 0; i < copies; ++i) overlap |= std::binary_search(written.begin(), written.end(), index_at(p.src_pages, i));

  for (const Tensor& pool : {p.k_cache, p.v_cache, p.k_scale, p.v_scale}) {
    if (pool.ndim < 3) continue;
    const int64_t stride = pool.stride[0] * size_of(pool.dtype), span = page_span(pool);
    char* base = pool.as<char>();
    std::vector<char> staged(overlap ? copies * span : 0);
    if (overlap)
      for (int64_t i = 0; i < copies; ++i) copy_page(pool, base + index_at(p.src_pages, i) * stride, pool, staged.data() + i * span);
    team().parallel_for(copies, grain_of(span), [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i)
        copy_page(pool, overlap ? staged.data() + i * span : base + index_at(p.src_pages, i) * stride, pool,
                  base + index_at(p.dst_pages, i) * stride);
    });
  }
}

void swap_pages(const SwapPagesParams& p) {
  check_copies("swap_pages", p.src_pages, p.dst_pages, p.k_from.size[0], "num_pages_from", p.k_to.size[0], "num_pages_to");
  const std::pair<Tensor, Tensor> pools[] = {
      {p.k_from, p.k_to}, {p.v_from, p.v_to}, {p.k_scale_from, p.k_scale_to}, {p.v_scale_from, p.v_scale_to}};
  for (const auto& [from, to] : pools) {
    if (from.ndim < 3) continue;
    const int64_t bytes = size_of(from.dtype);
    team().parallel_for(p.src_pages.size[0], grain_of(page_span(from)), [&, source = from, target = to](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i)
        copy_page(source, source.as<char>() + index_at(p.src_pages, i) * source.stride[0] * bytes, target,
                  target.as<char>() + index_at(p.dst_pages, i) * target.stride[0] * bytes);
    });
  }
}

}  // namespace pk
