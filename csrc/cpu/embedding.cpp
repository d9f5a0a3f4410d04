// Rows of an embedding, dense or packed, as floats.
#include "dispatch.h"
#include "kernels.h"
#include "simd.h"
#include "threads.h"
#include "weight_layout.h"

namespace pk {
namespace {

constexpr int64_t kGrain = 8;  // tokens below which waking the team costs more than the work

// Reads elements of one row, wherever its layout puts them.
struct RowReader {
  const uint8_t* weight;
  WeightFormat format;
  WeightLayout layout;
  int64_t rows, k;

  // One row of float numbers of type T: `lane` elements of a row block, or a plain row.
  template <class T>
  void floats(int64_t r, float* out) const {
    const T* w = reinterpret_cast<const T*>(weight);
    if (layout == WeightLayout::plain) {
      for (int64_t c = 0; c < k; ++c) out[c] = value(w + r * k + c);
      return;
    }
    w += r / kBlockRows * kBlockRows * k;
    const int64_t lane = r % kBlockRows, paired = sizeof(T) == 2 ? k / 2 * 2 : 0;
    for (int64_t c = 0; c < paired; ++c) out[c] = value(w + c / 2 * 2 * kBlockRows + 2 * lane + c % 2);
    for (int64_t c = paired; c < k; ++c) out[c] = value(w + c * kBlockRows + lane);
  }

  // int8 and fp8: codes and one scale.
  void channel(int64_t r, float* out) const {
    const bool plain = layout == WeightLayout::plain, int8 = format == WeightFormat::int8;
    const uint8_t* block = weight + r / kBlockRows * row_block_bytes(format, k);
    const int64_t lane = r % kBlockRows, whole = int8 ? k / kGroup * kGroup : 0;
    const float scale = load_bits<float>(plain ? weight + rows * k + 4 * r : block + 4 * lane);
    const uint8_t flip = int8 && !plain ? 0x80 : 0;
    for (int64_t c = 0; c < k; ++c) {
      const int64_t packed = c < whole ? c / 4 * 64 + 4 * lane + c % 4 : c * kBlockRows + lane;
      const uint8_t code = (plain ? weight[r * k + c] : block[64 + packed]) ^ flip;
      out[c] = (int8 ? float(int8_t(code)) : to_float(fp8{code})) * scale;
    }
  }

  // q4_0, q4_1, q8_0: per group a scale, perhaps a minimum, and codes.
  void blocked(int64_t r, float* out) const {
    const int64_t groups = k / kGroup, lane = r % kBlockRows;
    const int heads = format == WeightFormat::q4_1 ? 2 : 1;
    const bool plain = layout == WeightLayout::plain, nibbles = format != WeightFormat::q8_0;
    for (int64_t g = 0; g < groups; ++g, out += kGroup) {
      const uint8_t *scale, *codes;
      int64_t step = 2, quads = 4;  // bytes from scale to minimum, from quad to quad
      if (plain) {
        scale = weight + (r * groups + g) * row_bytes(format, kGroup);
        codes = scale + 2 * heads;
      } else {
        const uint8_t* block = weight + r / kBlockRows * row_block_bytes(format, k);
        const Q8Group at =
            nibbles ? Q8Group{g * row_block_bytes(format, kGroup), g * row_block_bytes(format, kGroup) + 32 * heads} : q8_group(g, groups);
        scale = block + at.scales + 2 * lane;
        codes = block + at.codes + 4 * lane;
        step = 32, quads = 64;
      }
      const float d = to_float(load_bits<f16>(scale)), m = heads == 2 ? to_float(load_bits<f16>(scale + step)) : 0.f;
      for (int c = 0; c < kGroup; ++c) {
        const int at = nibbles ? c % 16 : c;
        const uint8_t byte = codes[at / 4 * quads + at % 4];
        const int code = nibbles ? (c < 16 ? byte & 15 : byte >> 4) - (heads == 2 ? 0 : 8) : int8_t(plain ? byte : byte ^ 0x80);
        out[c] = d * float(code) + m;
      }
    }
  }

  void read(int64_t r, float* out) const {
    switch (format) {
      case WeightFormat::float32:
        return floats<float>(r, out);
      case WeightFormat::bfloat16:
        return floats<bf16>(r, out);
      case WeightFormat::float16:
        return floats<f16>(r, out);
      case WeightFormat::int8:
      case WeightFormat::fp8_e4m3:
        return channel(r, out);
      default:
        return blocked(r, out);
    }
  }

 private:
  template <class T>
  static float value(const T* p) {
    return to_float(load_bits<T>(p));
  }  // plain bytes may be unaligned
};

template <class T>
void convert_row(const T* dense, int64_t k, float* out) {
  for (int64_t c = 0; c < k; c += kLanes) store_n(out + c, load_n(dense + c, int(k - c)), int(k - c));
}

void read_row(const EmbeddingParams& p, int64_t r, float* out) {
  if (p.format == WeightFormat::dense) {
    visit_float(p.weight.dtype, [&]<class T>() { convert_row(p.weight.as<T>() + r * p.weight.stride[0], p.out.size[1], out); });
    return;
  }
  RowReader{p.weight.as<uint8_t>(), p.format, p.layout, p.num_embeddings, p.out.size[1]}.read(r, out);
}

}  // namespace

void embedding(const EmbeddingParams& p) {
  const int64_t tokens = p.ids.size[0], k = p.out.size[1];
  for (int64_t t = 0; t < tokens; ++t)
    if (const int64_t id = index_at(p.ids, t); id < 0 || id >= p.num_embeddings)
      fail("embedding: ids[" + std::to_string(t) + "] must be in [0, " + std::to_string(p.num_embeddings) + "), got " + std::to_string(id));
  team().parallel_for(tokens, kGrain, [&](int64_t begin, int64_t end, int) {
    static thread_local Scratch scratch;
    float* row = scratch.get<float>(k);
    for (int64_t t = begin; t < end; ++t) {
      read_row(p, index_at(p.ids, t), row);
      visit_float(p.out.dtype, [&]<class T>() {
        T* out = p.out.as<T>() + t * p.out.stride[0];
        for (int64_t c = 0; c < k; c += kLanes) store_n(out + c, load_n(row + c, int(k - c)), int(k - c));
      });
    }
  });
}

}  // namespace pk
