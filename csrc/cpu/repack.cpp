// From the plain byte order to rows16, sixteen rows at a time.
#include <cstring>
#include <vector>

#include "kernels.h"
#include "threads.h"
#include "weight_layout.h"

namespace pk {
namespace {

struct Source {
  const uint8_t* plain;
  int64_t rows, columns;
  int64_t row_stride;     // bytes from row to row (codes only for the channel formats)
  const uint8_t* scales;  // channel formats: float32 per row, behind the codes
};

constexpr uint32_t kFlipSigns = 0x80808080u;  // codes become code + 128, so that dot products take them as unsigned

inline void copy4(uint8_t* to, const uint8_t* from, uint32_t flip) {
  uint32_t four;
  std::memcpy(&four, from, 4);
  four ^= flip;
  std::memcpy(to, &four, 4);
}

template <class Word>
void repack_columns(const Source& s, const uint8_t* row, int lane, uint8_t* block) {  // float32, fp8: [k][16]
  for (int64_t c = 0; c < s.columns; ++c) std::memcpy(block + (c * kBlockRows + lane) * sizeof(Word), row + c * sizeof(Word), sizeof(Word));
}

void repack_pairs(const Source& s, const uint8_t* row, int lane, uint8_t* block) {  // 16-bit floats: [k / 2][16][2]
  for (int64_t c = 0; c + 1 < s.columns; c += 2) copy4(block + c * 32 + lane * 4, row + 2 * c, 0);
  if (s.columns & 1) std::memcpy(block + (s.columns - 1) * 32 + lane * 2, row + 2 * (s.columns - 1), 2);
}

void repack_int8(const Source& s, const uint8_t* row, int lane, uint8_t* codes) {
  const int64_t whole = s.columns / kGroup * kGroup;
  for (int64_t c = 0; c < whole; c += 4) copy4(codes + c * kBlockRows + lane * 4, row + c, kFlipSigns);
  for (int64_t c = whole; c < s.columns; ++c) codes[c * kBlockRows + lane] = row[c] ^ 0x80;
}

void repack_q4(const Source& s, const uint8_t* row, int lane, int heads, uint8_t* block) {
  const int plain_bytes = 2 * heads + 16, packed_bytes = kBlockRows * plain_bytes;
  for (int64_t g = 0; g < s.columns / kGroup; ++g, row += plain_bytes, block += packed_bytes) {
    for (int h = 0; h < heads; ++h) std::memcpy(block + 32 * h + lane * 2, row + 2 * h, 2);
    for (int j = 0; j < 4; ++j) copy4(block + 32 * heads + 64 * j + lane * 4, row + 2 * heads + 4 * j, 0);
  }
}

void repack_q8(const Source& s, const uint8_t* row, int lane, uint8_t* block) {
  const int64_t groups = s.columns / kGroup;
  for (int64_t g = 0; g < groups; ++g, row += 34) {
    const Q8Group at = q8_group(g, groups);
    std::memcpy(block + at.scales + lane * 2, row, 2);
    for (int j = 0; j < 8; ++j) copy4(block + at.codes + 64 * j + lane * 4, row + 2 + 4 * j, kFlipSigns);
  }
}

void repack_row(WeightFormat format, const Source& s, int64_t r, const uint8_t* zeros, uint8_t* block) {
  const bool real = r < s.rows;  // rows past the end are zeros
  const uint8_t* row = real ? s.plain + r * s.row_stride : zeros;
  const int lane = int(r % kBlockRows);
  if (is_channel_format(format)) std::memcpy(block + lane * 4, real ? s.scales + 4 * r : zeros, 4);
  switch (format) {
    case WeightFormat::float32:
      return repack_columns<float>(s, row, lane, block);
    case WeightFormat::bfloat16:
    case WeightFormat::float16:
      return repack_pairs(s, row, lane, block);
    case WeightFormat::int8:
      return repack_int8(s, row, lane, block + 64);
    case WeightFormat::fp8_e4m3:
      return repack_columns<uint8_t>(s, row, lane, block + 64);
    case WeightFormat::q4_0:
      return repack_q4(s, row, lane, 1, block);
    case WeightFormat::q4_1:
      return repack_q4(s, row, lane, 2, block);
    case WeightFormat::q8_0:
      return repack_q8(s, row, lane, block);
    case WeightFormat::dense:
      return;
  }
}

}  // namespace

void repack_rows16(const uint8_t* plain, uint8_t* rows16, WeightFormat format, int64_t rows, int64_t columns) {
  const int64_t stride = is_channel_format(format) ? columns : row_bytes(format, columns);
  const Source source{plain, rows, columns, stride, plain + rows * columns};
  const std::vector<uint8_t> zeros(size_t(row_bytes(format, columns)) + 4);
  team().parallel_for(round_up(rows, kBlockRows) / kBlockRows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t b = begin; b < end; ++b)
      for (int64_t r = b * kBlockRows; r < (b + 1) * kBlockRows; ++r)
        repack_row(format, source, r, zeros.data(), rows16 + b * row_block_bytes(format, columns));
  });
}

}  // namespace pk
