// ldmatrix, stmatrix and mma.sync: fragments as the PTX manual lays them out, one warp at a time.
//
// Throughout: group = lane / 4 and quad = lane % 4, the manual's groupID and threadID_in_group.
#include "collective.h"
#include "numeric.h"

namespace emu {
namespace {

struct MatrixArgument {
  uint32_t* registers;
  uint32_t address;
  int count;
  bool transposed;
  bool valid;
};

// Extra wavefronts of eight 16-byte rows that one matrix reads or writes at once.
int extra_wavefronts(const Collective& c, int matrix) {
  int conflicts = 1;
  for (int i = 0; i < 8; i++) {
    const uint32_t at = static_cast<MatrixArgument*>(c.argument[matrix * 8 + i])->address;
    int same_bank = 1;
    for (int j = 0; j < i; j++) {
      const uint32_t other = static_cast<MatrixArgument*>(c.argument[matrix * 8 + j])->address;
      if (other != at && other / 16 % 8 == at / 16 % 8) same_bank++;
    }
    conflicts = same_bank > conflicts ? same_bank : conflicts;
  }
  return conflicts - 1;
}

// Where element pair (register of `lane`) of an 8x8 matrix lies: two halves at [row][column], as byte offsets into its rows.
struct Place {
  int row[2], column[2];
};
Place place(int lane, bool transposed) {
  const int group = lane >> 2, quad = lane & 3;
  if (transposed) return {{2 * quad, 2 * quad + 1}, {group, group}};
  return {{group, group}, {2 * quad, 2 * quad + 1}};
}

void execute_ldmatrix(Block& b, int, const Collective& c, unsigned) {
  b.counters.ldmatrix++;
  const int count = static_cast<MatrixArgument*>(c.argument[0])->count;
  for (int m = 0; m < count; m++) {
    b.counters.matrix_bank_conflicts += extra_wavefronts(c, m);
    for (int lane = 0; lane < 32; lane++) {
      const auto& x = *static_cast<MatrixArgument*>(c.argument[lane]);
      const Place at = place(lane, x.transposed);
      uint32_t packed = 0;
      for (int half = 0; half < 2; half++) {
        const auto& row = *static_cast<MatrixArgument*>(c.argument[m * 8 + at.row[half]]);
        uint16_t value = 0x7fff;  // a row outside shared memory, reported already
        if (row.valid) std::memcpy(&value, b.shared + row.address + 2 * at.column[half], 2);
        packed |= static_cast<uint32_t>(value) << (16 * half);
      }
      x.registers[m] = packed;
    }
  }
}

void execute_stmatrix(Block& b, int, const Collective& c, unsigned) {
  b.counters.stmatrix++;
  const int count = static_cast<MatrixArgument*>(c.argument[0])->count;
  for (int m = 0; m < count; m++) {
    b.counters.matrix_bank_conflicts += extra_wavefronts(c, m);
    for (int lane = 0; lane < 32; lane++) {
      const auto& x = *static_cast<MatrixArgument*>(c.argument[lane]);
      const Place at = place(lane, x.transposed);
      for (int half = 0; half < 2; half++) {
        const auto& row = *static_cast<MatrixArgument*>(c.argument[m * 8 + at.row[half]]);
        const auto value = static_cast<uint16_t>(x.registers[m] >> (16 * half));
        if (row.valid) std::memcpy(b.shared + row.address + 2 * at.column[half], &value, 2);
      }
    }
  }
}

}  // namespace

void ldmatrix(uint32_t* registers, int count, uint32_t address, bool transposed, Site where) {
  Block& b = *block();
  MatrixArgument a{registers, address, count, transposed, false};
  if (fiber()->lane < count * 8) {  // the other lanes' addresses are ignored
    a.valid = b.check_shared(address, 16, 16, "ldmatrix row", where);
    if (a.valid) b.touch(Touch::read, address, 16, where);
  }
  collective(~0u, Operation::ldmatrix, &a, "ldmatrix", where, execute_ldmatrix);
}

void stmatrix(uint32_t address, const uint32_t* registers, int count, bool transposed, Site where) {
  Block& b = *block();
  MatrixArgument a{const_cast<uint32_t*>(registers), address, count, transposed, false};
  if (fiber()->lane < count * 8) {
    a.valid = b.check_shared(address, 16, 16, "stmatrix row", where);
    if (a.valid) b.touch(Touch::write, address, 16, where);
  }
  collective(~0u, Operation::stmatrix, &a, "stmatrix", where, execute_stmatrix);
}

namespace {

struct MmaArgument {
  void* d;
  const uint32_t *a, *b;
  const void* c;
  int k;
  Element type;
};

// Elements of A and B that a lane's registers hold: `width` per register, register r at row (A) or k (B) offsets.
// 16-bit: A registers are (row g, k 2q), (row g+8, k 2q), (row g, k 2q+8), (row g+8, k 2q+8); B's are (k 2q), (k 2q+8).
// 8-bit: the same with k = 4q and steps of 16.
template <class Decode, class T>
void gather(const Collective& meeting, int k, int width, T* a, T* b, Decode decode) {
  const int step = 4 * width;  // k columns that one register row of the quad covers
  for (int lane = 0; lane < 32; lane++) {
    const auto& x = *static_cast<MmaArgument*>(meeting.argument[lane]);
    const int group = lane >> 2, quad = lane & 3;
    for (int block_k = 0; block_k < k / step; block_k++) {
      for (int e = 0; e < width; e++) {
        const int column = block_k * step + quad * width + e;
        a[group * k + column] = decode(x.a[2 * block_k], e);
        a[(group + 8) * k + column] = decode(x.a[2 * block_k + 1], e);
        b[column * 8 + group] = decode(x.b[block_k], e);
      }
    }
  }
}

// D and C: registers 0, 1 at (row g, columns 2q, 2q+1), registers 2, 3 eight rows below.
template <class T>
void scatter(const Collective& meeting, const T* product) {
  for (int lane = 0; lane < 32; lane++) {
    const auto& x = *static_cast<MmaArgument*>(meeting.argument[lane]);
    const int group = lane >> 2, quad = lane & 3;
    for (int i = 0; i < 4; i++) {
      const T sum = product[(group + 8 * (i >> 1)) * 8 + 2 * quad + (i & 1)];
      static_cast<T*>(x.d)[i] = static_cast<const T*>(x.c)[i] + sum;
    }
  }
}

void execute_mma(Block& b, int, const Collective& c, unsigned) {
  b.counters.mma++;
  const auto& first = *static_cast<MmaArgument*>(c.argument[0]);
  float a[16 * 32], bm[32 * 8], d[16 * 8];
  const bool narrow = first.type == Element::e4m3 || first.type == Element::e5m2;
  if (narrow) {
    const float* values = first.type == Element::e4m3 ? e4m3_table() : e5m2_table();
    gather(c, first.k, 4, a, bm, [&](uint32_t r, int e) { return values[r >> (8 * e) & 0xff]; });
  } else if (first.type == Element::bf16) {
    gather(c, first.k, 2, a, bm, [](uint32_t r, int e) { return float_of_bits(e ? r & 0xffff0000u : r << 16); });
  } else {
    const float* values = half_table();
    gather(c, first.k, 2, a, bm, [&](uint32_t r, int e) { return values[r >> (16 * e) & 0xffff]; });
  }
  multiply(d, a, bm, 16, 8, first.k);
  scatter(c, d);
}

void execute_mma_s8(Block& b, int, const Collective& c, unsigned) {
  b.counters.mma++;
  const int k = static_cast<MmaArgument*>(c.argument[0])->k;
  int32_t a[16 * 32], bm[32 * 8], d[16 * 8] = {};
  gather(c, k, 4, a, bm, [](uint32_t r, int e) { return static_cast<int32_t>(static_cast<int8_t>(r >> (8 * e))); });
  for (int i = 0; i < 16; i++) {
    for (int p = 0; p < k; p++) {
      for (int j = 0; j < 8; j++) d[i * 8 + j] += a[i * k + p] * bm[p * 8 + j];
    }
  }
  scatter(c, d);
}

}  // namespace

void mma(float* d, const uint32_t* a, const uint32_t* b, const float* c, int k, Element type, Site where) {
  MmaArgument argument{d, a, b, c, k, type};
  collective(~0u, Operation::mma, &argument, "mma.sync", where, execute_mma);
}

void mma(int32_t* d, const uint32_t* a, const uint32_t* b, const int32_t* c, int k, Site where) {
  MmaArgument argument{d, a, b, c, k, Element::s8};
  collective(~0u, Operation::mma, &argument, "mma.sync", where, execute_mma_s8);
}

}  // namespace emu
