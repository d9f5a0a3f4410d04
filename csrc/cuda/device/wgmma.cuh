// wgmma: products of a warpgroup from shared memory, m64 x N x k16, float accumulators. sm_90a. Included by platform.cuh.
//
// Thread t of the warpgroup holds rows 16 * (t / 32) + g and + 8 (g = t % 32 / 4): d[4 j + 0..1] at columns 8 j + 2 q.. of the
// first row, d[4 j + 2..3] of the second (q = t % 4). A from registers is laid out as for mma.sync, 16 rows to a warp.
// Between issue and wait nobody touches the accumulators, the registers of A, or the operands in shared memory.
#pragma once

namespace pk::device {

enum class SharedLayout : uint64_t { interleaved = 0, swizzle128 = 1, swizzle64 = 2, swizzle32 = 3 };

// Describes an operand in shared memory. K-major with 128-byte swizzle: `stride` = bytes between groups of 8 rows (1024 when
// dense), `leading` unused; k advances by adding 32 bytes to the address. N-major with 128-byte swizzle: `leading` = bytes
// between tiles of 64 columns, `stride` = bytes between groups of 8 k (1024 when dense); k advances by 2 * stride.
PK_DEVICE uint64_t wgmma_descriptor(uint32_t address, uint32_t leading, uint32_t stride, SharedLayout layout = SharedLayout::swizzle128) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(leading >> 4 & 0x3fff) << 16 |
         static_cast<uint64_t>(stride >> 4 & 0x3fff) << 32 | static_cast<uint64_t>(layout) << 62;
}

#ifdef __CUDACC__

// Before the first wgmma, and whenever its registers were used by anything else.
PK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most `Left` groups are in flight.
template <int Left>
PK_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}
// Keeps the compiler from moving uses of the accumulators across an issue or a wait.
template <int N>
PK_DEVICE void wgmma_hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <class T, int N, bool TransposedB>
struct Wgmma;

// The operand lists of the instruction, by registers of the accumulator.
#define PK_R0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define PK_R1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define PK_R2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define PK_R3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define PK_R4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define PK_R5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define PK_R6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define PK_R7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define PK_R8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define PK_R9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define PK_R10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define PK_R11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define PK_R12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define PK_R13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define PK_R14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define PK_R15 "%120,%121,%122,%123,%124,%125,%126,%127"
#define PK_D0 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define PK_D1 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define PK_D2 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define PK_D3 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define PK_D4 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define PK_D5 "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define PK_D6 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define PK_D7 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define PK_D8 "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define PK_D9 "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define PK_D10 "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define PK_D11 "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define PK_D12 "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define PK_D13 "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define PK_D14 "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define PK_D15 "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

#define PK_NAMES_16 PK_R0
#define PK_SLOTS_16 PK_D0
#define PK_NAMES_32 PK_R0 "," PK_R1
#define PK_SLOTS_32 PK_D0, PK_D1
#define PK_NAMES_64 PK_R0 "," PK_R1 "," PK_R2 "," PK_R3
#define PK_SLOTS_64 PK_D0, PK_D1, PK_D2, PK_D3
#define PK_NAMES_80 PK_R0 "," PK_R1 "," PK_R2 "," PK_R3 "," PK_R4
#define PK_SLOTS_80 PK_D0, PK_D1, PK_D2, PK_D3, PK_D4
#define PK_NAMES_96 PK_R0 "," PK_R1 "," PK_R2 "," PK_R3 "," PK_R4 "," PK_R5
#define PK_SLOTS_96 PK_D0, PK_D1, PK_D2, PK_D3, PK_D4, PK_D5
#define PK_NAMES_128 PK_R0 "," PK_R1 "," PK_R2 "," PK_R3 "," PK_R4 "," PK_R5 "," PK_R6 "," PK_R7
#define PK_SLOTS_128 PK_D0, PK_D1, PK_D2, PK_D3, PK_D4, PK_D5, PK_D6, PK_D7
#define PK_NAMES_160 PK_R0 "," PK_R1 "," PK_R2 "," PK_R3 "," PK_R4 "," PK_R5 "," PK_R6 "," PK_R7 "," PK_R8 "," PK_R9
#define PK_SLOTS_160 PK_D0, PK_D1, PK_D2, PK_D3, PK_D4, PK_D5, PK_D6, PK_D7, PK_D8, PK_D9
#define PK_NAMES_192 PK_R0 "," PK_R1 "," PK_R2 "," PK_R3 "," PK_R4 "," PK_R5 "," PK_R6 "," PK_R7 "," PK_R8 "," PK_R9 "," PK_R10 "," PK_R11
#define PK_SLOTS_192 PK_D0, PK_D1, PK_D2, PK_D3, PK_D4, PK_D5, PK_D6, PK_D7, PK_D8, PK_D9, PK_D10, PK_D11
#define PK_NAMES_256                                                                                                               \
  PK_R0 "," PK_R1 "," PK_R2 "," PK_R3 "," PK_R4 "," PK_R5 "," PK_R6 "," PK_R7 "," PK_R8 "," PK_R9 "," PK_R10 "," PK_R11 "," PK_R12 \
        "," PK_R13 "," PK_R14 "," PK_R15
#define PK_SLOTS_256 PK_D0, PK_D1, PK_D2, PK_D3, PK_D4, PK_D5, PK_D6, PK_D7, PK_D8, PK_D9, PK_D10, PK_D11, PK_D12, PK_D13, PK_D14, PK_D15

// One specialisation: `ss` with both operands in shared memory, `rs` with A in registers. `A` to `P` number the operands that
// follow the N / 2 accumulators.
#define PK_WGMMA(T, TYPE, N, TRANS, A0, A1, A2, A3, B, P)                                                                         \
  template <>                                                                                                                     \
  struct Wgmma<T, N, TRANS> {                                                                                                     \
    PK_DEVICE static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {                                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE \
                   " {" PK_NAMES_##N "}, %" #A0 ", %" #A1 ", p, 1, 1, 0, %" #A3 ";\n}"                                            \
                   : PK_SLOTS_##N                                                                                                 \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(TRANS ? 1 : 0));                                                        \
    }                                                                                                                             \
    PK_DEVICE static void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {                             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE  \
                   " {" PK_NAMES_##N "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", p, 1, 1, %" PK_TRANS_INDEX_##N ";\n}"    \
                   : PK_SLOTS_##N                                                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANS ? 1 : 0));                    \
    }                                                                                                                             \
  };
#define PK_WGMMA_N(N, A0, A1, A2, A3, B, P)                       \
  PK_WGMMA(__half, "f16", N, false, A0, A1, A2, A3, B, P)         \
  PK_WGMMA(__half, "f16", N, true, A0, A1, A2, A3, B, P)          \
  PK_WGMMA(__nv_bfloat16, "bf16", N, false, A0, A1, A2, A3, B, P) \
  PK_WGMMA(__nv_bfloat16, "bf16", N, true, A0, A1, A2, A3, B, P)
#define PK_TRANS_INDEX_16 "14"
#define PK_TRANS_INDEX_32 "22"
#define PK_TRANS_INDEX_64 "38"
#define PK_TRANS_INDEX_80 "46"
#define PK_TRANS_INDEX_96 "54"
#define PK_TRANS_INDEX_128 "70"
#define PK_TRANS_INDEX_160 "86"
#define PK_TRANS_INDEX_192 "102"
#define PK_TRANS_INDEX_256 "134"
PK_WGMMA_N(16, 8, 9, 10, 11, 12, 13)
PK_WGMMA_N(32, 16, 17, 18, 19, 20, 21)
PK_WGMMA_N(64, 32, 33, 34, 35, 36, 37)
PK_WGMMA_N(80, 40, 41, 42, 43, 44, 45)
PK_WGMMA_N(96, 48, 49, 50, 51, 52, 53)
PK_WGMMA_N(128, 64, 65, 66, 67, 68, 69)
PK_WGMMA_N(160, 80, 81, 82, 83, 84, 85)
PK_WGMMA_N(192, 96, 97, 98, 99, 100, 101)
PK_WGMMA_N(256, 128, 129, 130, 131, 132, 133)

// d = [accumulate ? d : 0] + A B. B is K-major, or N-major when `TransposedB`.
template <class T, bool TransposedB = false, int Half>
PK_DEVICE void wgmma_ss(float (&d)[Half], uint64_t a, uint64_t b, bool accumulate) {
  Wgmma<T, 2 * Half, TransposedB>::ss(d, a, b, accumulate);
}
template <class T, bool TransposedB = false, int Half>
PK_DEVICE void wgmma_rs(float (&d)[Half], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  Wgmma<T, 2 * Half, TransposedB>::rs(d, a, b, accumulate);
}

#else

inline void wgmma_fence(EMU_HERE) { emu::wgmma_fence(EMU_SITE); }
inline void wgmma_commit(EMU_HERE) { emu::wgmma_commit(EMU_SITE); }
template <int Left>
inline void wgmma_wait(EMU_HERE) {
  emu::wgmma_wait(Left, EMU_SITE);
}
template <int N>
inline void wgmma_hold(float (&)[N]) {}

template <class T, bool TransposedB = false, int Half>
inline void wgmma_ss(float (&d)[Half], uint64_t a, uint64_t b, bool accumulate, EMU_HERE) {
  emu::wgmma({d, nullptr, a, b, 2 * Half, element_of<T>(), accumulate, false, TransposedB}, EMU_SITE);
}
template <class T, bool TransposedB = false, int Half>
inline void wgmma_rs(float (&d)[Half], const uint32_t (&a)[4], uint64_t b, bool accumulate, EMU_HERE) {
  emu::wgmma({d, a, 0, b, 2 * Half, element_of<T>(), accumulate, false, TransposedB}, EMU_SITE);
}

#endif

}  // namespace pk::device
