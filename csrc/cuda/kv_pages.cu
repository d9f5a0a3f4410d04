// Reads a paged KV cache back: tokens of all sequences in turn, dequantised; and copies of whole pages, within a cache and between two.
#include "aligned.h"
#include "device/kv_rows.cuh"
#include "kernels.h"
#include "launch.h"

namespace pk::cuda {
namespace {

using namespace device;

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Gather {
  Pool k_pool, v_pool;
  const int *table, *seqlens;
  int64_t table_row, seqlens_stride;
  int batch, kv_heads;
  void *k, *v;
  DType type;
  int64_t k_token, k_head, v_token, v_head;
};

// The sequence that gathered token t belongs to, and its place there; sequence == batch past the last one. The whole warp asks.
struct Place {
  int sequence;
  int64_t token;
};
PK_DEVICE Place place_of(const Gather& g, int64_t t) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int64_t before = 0;
  for (int b0 = 0; b0 < g.batch; b0 += 32) {
    const int own = b0 + lane < g.batch ? g.seqlens[(b0 + lane) * g.seqlens_stride] : 0;
    int through = own;  // inclusive prefix sum over the lanes
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kFullWarp, through, static_cast<unsigned>(step));
      if (lane >= step) through += other;
    }
    const unsigned past = __ballot_sync(kFullWarp, t < before + through);
    if (past) {
      const int at = __ffs(static_cast<int>(past)) - 1;
      return {b0 + at, t - before - __shfl_sync(kFullWarp, through - own, at)};
    }
    before += __shfl_sync(kFullWarp, through, 31);
  }
  return {g.batch, 0};
}

// A warp per token and head of k or v.
__global__ void __launch_bounds__(kThreads) gather_kernel(const Gather g) {
  const int64_t t = blockIdx.x;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const Place place = place_of(g, t);
  if (place.sequence == g.batch) return;
  const int64_t page_size = g.k_pool.page_size;
  const int64_t page = g.table[place.sequence * g.table_row + place.token / page_size];
  const int64_t slot = page * page_size + place.token % page_size;
  for (int i = warp; i < 2 * g.kv_heads; i += kWarps) {
    if (i < g.kv_heads) {
      load_row(g.k_pool, slot, i, g.type, offset(g.k, g.type, t * g.k_token + i * g.k_head));
    } else {
      const int h = i - g.kv_heads;
      load_row(g.v_pool, slot, h, g.type, offset(g.v, g.type, t * g.v_token + h * g.v_head));
    }
  }
}

// Pages as rows of bytes: [page_size][heads] rows of `row_bytes`.
struct PageRows {
  char* base = nullptr;
  int64_t num_pages = 0, page = 0, token = 0, head = 0;  // strides in bytes
  int page_size = 0, heads = 0, row_bytes = 0, unit = 1;

  PageRows() = default;
  explicit PageRows(const Tensor& t)
      : base(t.as<char>()), num_pages(t.size[0]), page_size(static_cast<int>(t.size[1])), heads(static_cast<int>(t.size[2])) {
    const int64_t bytes = size_of(t.dtype);
    page = t.stride[0] * bytes;
    token = t.stride[1] * bytes;
    head = t.stride[2] * bytes;
    row_bytes = static_cast<int>((t.ndim == 4 ? t.size[3] : 1) * bytes);
    const int64_t all = reinterpret_cast<intptr_t>(base) | page | token | head | row_bytes;
    unit = all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : all % 2 == 0 ? 2 : 1;
  }
  int64_t page_bytes() const { return int64_t{page_size} * heads * row_bytes; }
  // Null for a page that does not exist: nothing is read or written there.
  PK_DEVICE char* at(int64_t index) const { return index >= 0 && index < num_pages ? base + index * page : nullptr; }
  PK_DEVICE int64_t row(int i) const { return i / heads * token + i % heads * head; }
};

PK_DEVICE void copy_unit(char* to, const char* from, int unit) {
  if (unit == 16) {
    store_global_128(to, load_global_128(from));
  } else if (unit == 4) {
    *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(from);
  } else if (unit == 2) {
    *reinterpret_cast<uint16_t*>(to) = *reinterpret_cast<const uint16_t*>(from);
  } else {
    *to = *from;
  }
}

// Between pages and a dense [copies][page] staging area: every source is read before any destination is written.
template <bool kToStage>
__global__ void __launch_bounds__(kThreads) stage_kernel(const PageRows rows, const int64_t* pages, int64_t stride, char* stage) {
  char* dense = stage + blockIdx.x * (int64_t{rows.page_size} * rows.heads * rows.row_bytes);
  char* page = rows.at(pages[blockIdx.x * stride]);
  if (page == nullptr) return;
  const int units = rows.row_bytes / rows.unit, count = rows.page_size * rows.heads * units;
  for (int i = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x); i < count;
       i += kThreads * static_cast<int>(gridDim.y)) {
    const int row = i / units, at = i % units * rows.unit;
    char* scattered = page + rows.row(row) + at;
    char* packed = dense + int64_t{row} * rows.row_bytes + at;
    copy_unit(kToStage ? packed : scattered, kToStage ? scattered : packed, rows.unit);
  }
}

// The pages of one cache and of another, either of which may be in pinned host memory.
struct Swap {
  PageRows from, to;
  const int64_t *src, *dst;
  int64_t src_stride, dst_stride;
  int unit;  // of both sides
};

__global__ void __launch_bounds__(kThreads) swap_kernel(const Swap s) {
  const char* from = s.from.at(s.src[blockIdx.x * s.src_stride]);
  char* to = s.to.at(s.dst[blockIdx.x * s.dst_stride]);
  if (from == nullptr || to == nullptr) return;
  const int units = s.from.row_bytes / s.unit, count = s.from.page_size * s.from.heads * units;
  for (int i = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x); i < count;
       i += kThreads * static_cast<int>(gridDim.y)) {
    const int row = i / units, at = i % units * s.unit;
    copy_unit(to + s.to.row(row) + at, from + s.from.row(row) + at, s.unit);
  }
}

// A block per copy and share of a page, enough of them that every thread has one unit, up to a limit.
Grid page_grid(int64_t copies, int64_t page_bytes, int unit) {
  const int64_t blocks = (page_bytes / unit + kThreads - 1) / kThreads;
  return {dim3(static_cast<unsigned>(copies), static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, 64))), dim3(kThreads)};
}

constexpr int64_t kAlign = 256;
int64_t staged_bytes(const Tensor& t, int64_t copies) {
  return t.ndim < 3 ? 0 : (copies * PageRows(t).page_bytes() + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

cudaError_t gather_kv(const GatherParams& p, const Launch& on) {
  if (p.k.size[0] == 0) return cudaSuccess;
  const bool wide = rows_aligned(p.k) && rows_aligned(p.v) && p.k.size[2] % device::kFloats == 0 && p.v.size[2] % device::kFloats == 0;
  const Gather call{Pool(p.k_cache, p.k_scale, wide && rows_aligned(p.k_cache)),
                    Pool(p.v_cache, p.v_scale, wide && rows_aligned(p.v_cache)),
                    p.block_table.as<const int>(),
                    p.seqlens_k.as<const int>(),
                    p.block_table.stride[0],
                    p.seqlens_k.stride[0],
                    static_cast<int>(p.seqlens_k.size[0]),
                    static_cast<int>(p.k.size[1]),
                    p.k.data,
                    p.v.data,
                    p.k.dtype,
                    p.k.stride[0],
                    p.k.stride[1],
                    p.v.stride[0],
                    p.v.stride[1]};
  return launch(gather_kernel, {dim3(static_cast<unsigned>(p.k.size[0])), dim3(kThreads)}, on.stream, call);
}

int64_t copy_pages_scratch_bytes(const CopyPagesParams& p) {
  int64_t bytes = 0;
  for (const Tensor* t : {&p.k_cache, &p.v_cache, &p.k_scale, &p.v_scale}) bytes += staged_bytes(*t, p.src_pages.size[0]);
  return bytes;
}

cudaError_t copy_pages(const CopyPagesParams& p, const Launch& on) {
  const int64_t copies = p.src_pages.size[0];
  if (copies == 0) return cudaSuccess;
  for (const bool to_stage : {true, false}) {
    char* stage = static_cast<char*>(on.scratch);
    const Tensor& pages = to_stage ? p.src_pages : p.dst_pages;
    for (const Tensor* t : {&p.k_cache, &p.v_cache, &p.k_scale, &p.v_scale}) {
      if (t->ndim < 3) continue;
      const PageRows rows(*t);
      const Grid grid = page_grid(copies, rows.page_bytes(), rows.unit);
      const cudaError_t status = launch(to_stage ? stage_kernel<true> : stage_kernel<false>, grid, on.stream, rows,
                                        pages.as<const int64_t>(), pages.stride[0], stage);
      if (status != cudaSuccess) return status;
      stage += staged_bytes(*t, copies);
    }
  }
  return cudaSuccess;
}

cudaError_t swap_pages(const SwapPagesParams& p, const Launch& on) {
  const int64_t copies = p.src_pages.size[0];
  if (copies == 0) return cudaSuccess;
  const Tensor* const pools[][2] = {
      {&p.k_from, &p.k_to}, {&p.v_from, &p.v_to}, {&p.k_scale_from, &p.k_scale_to}, {&p.v_scale_from, &p.v_scale_to}};
  for (const auto& [source, target] : pools) {
    if (source->ndim < 3) continue;
    const PageRows from(*source), to(*target);
    const Swap call{from,
                    to,
                    p.src_pages.as<const int64_t>(),
                    p.dst_pages.as<const int64_t>(),
                    p.src_pages.stride[0],
                    p.dst_pages.stride[0],
                    std::min(from.unit, to.unit)};
    const cudaError_t status = launch(swap_kernel, page_grid(copies, from.page_bytes(), call.unit), on.stream, call);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace pk::cuda
