// The roofs of the roofline: bandwidth of each memory level and peak of each kind of dot product.
//
// Every inner loop is written with named accumulators and `asm volatile`, for two reasons that were measured: gcc spills
// an array of accumulators to the stack (half the peak), and folds a loop whose result nobody needs.
#include "ceilings.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "threads.h"

#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef __SSE2__
#include <immintrin.h>
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif

namespace pk {
namespace {

// ---- compute ----------------------------------------------------------------------------------------------------
// One kernel: `loops` rounds of twelve independent steps, enough to hide latency x throughput on any core.
struct Peak {
  const char* name;
  void (*run)(int64_t loops);
  double ops_per_loop;
};

#define PK_TIMES6(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define PK_TIMES12(X) PK_TIMES6(X) X(6) X(7) X(8) X(9) X(10) X(11)

// Declares accumulators a0..a11 and operands x, y of type V, then runs STEP (an asm statement on a##i) on each.
#define PK_PEAK(NAME, V, X0, Y0, STEP)                       \
  void NAME(int64_t loops) {                                 \
    V x = X0, y = Y0;                                        \
    V a0 = x, a1 = x, a2 = x, a3 = x, a4 = x, a5 = x;        \
    V a6 = x, a7 = x, a8 = x, a9 = x, a10 = x, a11 = x;      \
    for (int64_t k = 0; k < loops; ++k) { PK_TIMES12(STEP) } \
  }

#if defined(__AVX512F__)
#define PK_FMA(i) asm volatile("vfmadd231ps %2, %1, %0" : "+v"(a##i) : "v"(x), "v"(y));
PK_PEAK(fma_peak, __m512, _mm512_setzero_ps(), _mm512_setzero_ps(), PK_FMA)
#if defined(__AVX512BF16__)
#define PK_BF16(i) asm volatile("vdpbf16ps %2, %1, %0" : "+v"(a##i) : "v"(x), "v"(y));
PK_PEAK(bf16_peak, __m512i, _mm512_setzero_si512(), _mm512_setzero_si512(), PK_BF16)
#endif
#if defined(__AVX512VNNI__)
#define PK_VNNI(i) asm volatile("vpdpbusd %2, %1, %0" : "+v"(a##i) : "v"(x), "v"(y));
PK_PEAK(int8_peak, __m512i, _mm512_setzero_si512(), _mm512_setzero_si512(), PK_VNNI)
#endif
#elif defined(__AVX2__)
#define PK_FMA(i) asm volatile("vfmadd231ps %2, %1, %0" : "+x"(a##i) : "x"(x), "x"(y));
PK_PEAK(fma_peak, __m256, _mm256_setzero_ps(), _mm256_setzero_ps(), PK_FMA)
// u8 x s8 pairs, widened to int32 at once: what long dot products of full-range codes need.
#define PK_MADD32(i)                                                                                 \
  asm volatile("vpmaddubsw %2, %1, %%ymm15\n vpmaddwd %2, %%ymm15, %%ymm15\n vpaddd %%ymm15, %0, %0" \
               : "+x"(a##i)                                                                          \
               : "x"(x), "x"(y)                                                                      \
               : "xmm15");
PK_PEAK(int8_peak, __m256i, _mm256_setzero_si256(), _mm256_setzero_si256(), PK_MADD32)
// The pairs summed in int16, which short blocks of 4-bit codes allow. Products have registers of their own: a chain
// through one temporary ran 6 % slower.
#define PK_PAIR(i, t) asm volatile("vpmaddubsw %2, %1, %0" : "=x"(t) : "x"(x), "x"(y));
#define PK_SUM(i, t) asm volatile("vpaddw %1, %0, %0" : "+x"(a##i) : "x"(t));
#define PK_EACH(X) X(0, t0) X(1, t1) X(2, t2) X(3, t3) X(4, t4) X(5, t5)
void int8_pairs_peak(int64_t loops) {
  __m256i x = _mm256_setzero_si256(), y = x, a0 = x, a1 = x, a2 = x, a3 = x, a4 = x, a5 = x, t0, t1, t2, t3, t4, t5;
  for (int64_t k = 0; k < loops; ++k) { PK_EACH(PK_PAIR) PK_EACH(PK_SUM) PK_EACH(PK_PAIR) PK_EACH(PK_SUM) }
}
#elif defined(__SSE2__)
// No fused multiply-add at this level: multiplies in half of the accumulators, additions in the other half.
#define PK_MUL(i) asm volatile("mulps %1, %0" : "+x"(a##i) : "x"(x));
#define PK_ADD(i) asm volatile("addps %1, %0" : "+x"(a##i) : "x"(y));
void fma_peak(int64_t loops) {
  __m128 x = _mm_setzero_ps(), y = x, a0 = x, a1 = x, a2 = x, a3 = x, a4 = x, a5 = x;
  __m128 a6 = x, a7 = x, a8 = x, a9 = x, a10 = x, a11 = x;
  for (int64_t k = 0; k < loops; ++k) {
    PK_MUL(0) PK_ADD(6) PK_MUL(1) PK_ADD(7) PK_MUL(2) PK_ADD(8) PK_MUL(3) PK_ADD(9) PK_MUL(4) PK_ADD(10) PK_MUL(5) PK_ADD(11)
  }
}
// Codes widened to int16 beforehand: the multiply-add of pairs is the widest integer product here.
#define PK_MADD32(i) asm volatile("movdqa %1, %%xmm15\n pmaddwd %2, %%xmm15\n paddd %%xmm15, %0" : "+x"(a##i) : "x"(x), "x"(y) : "xmm15");
PK_PEAK(int8_peak, __m128i, _mm_setzero_si128(), _mm_setzero_si128(), PK_MADD32)
#elif defined(__aarch64__)
#define PK_FMA(i) asm volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(a##i) : "w"(x), "w"(y));
PK_PEAK(fma_peak, float32x4_t, vdupq_n_f32(0.f), vdupq_n_f32(0.f), PK_FMA)
#define PK_SMLAL(i) asm volatile("smlal %0.8h, %1.8b, %2.8b" : "+w"(a##i) : "w"(x), "w"(y));
PK_PEAK(int8_peak, int8x16_t, vdupq_n_s8(0), vdupq_n_s8(0), PK_SMLAL)
#else
// No inline assembly to name: operands that the compiler cannot know keep it from folding the chains.
void fma_peak(int64_t loops) {
  volatile float one = 1.f, zero = 0.f;
  float x = one, y = zero, a0 = x, a1 = x, a2 = x, a3 = x, a4 = x, a5 = x, a6 = x, a7 = x, a8 = x, a9 = x, a10 = x, a11 = x;
#define PK_FMA(i) a##i = a##i * x + y;
  for (int64_t k = 0; k < loops; ++k) { PK_TIMES12(PK_FMA) }
  zero = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9 + a10 + a11;
}
#endif

constexpr double kChains = 12;
const Peak kPeaks[] = {
#if defined(__AVX512F__)
    {"float32", fma_peak, kChains * 16 * 2},
#if defined(__AVX512BF16__)
    {"bfloat16", bf16_peak, kChains * 32 * 2},
#endif
#if defined(__AVX512VNNI__)
    {"int8", int8_peak, kChains * 64 * 2},
#endif
#elif defined(__AVX2__)
    {"float32", fma_peak, kChains * 8 * 2},
    {"int8", int8_peak, kChains * 32 * 2},
    {"int8_pairs", int8_pairs_peak, kChains * 32 * 2},
#elif defined(__SSE2__)
    {"float32", fma_peak, kChains * 4},
    {"int8", int8_peak, kChains * 8 * 2},
#elif defined(__aarch64__)
    {"float32", fma_peak, kChains * 4 * 2},
    {"int8", int8_peak, kChains * 8 * 2},
#else
    {"float32", fma_peak, kChains * 2},
#endif
};

// ---- memory -----------------------------------------------------------------------------------------------------
#if defined(__AVX512F__)
typedef __m512i Line;
#elif defined(__AVX2__)
typedef __m256i Line;
#else
typedef int32_t Line __attribute__((vector_size(16)));
#endif
#if defined(__AVX512F__)
#define PK_USE(v) asm volatile("" ::"v"(v));
#elif defined(__SSE2__)
#define PK_USE(v) asm volatile("" ::"x"(v));
#elif defined(__aarch64__)
#define PK_USE(v) asm volatile("" ::"w"(v));
#else
#define PK_USE(v) asm volatile("" ::"m"(v));
#endif

constexpr int64_t kPage = 4096;       // buffers are whole pages
constexpr int64_t kPiece = 64 << 10;  // one round of a sweep
constexpr int kStreams = 4;           // walked side by side: about 15 % faster from DRAM than one, and no prefetch hint helped

void read_piece(const char* p, int64_t bytes) {
  const int64_t part = bytes / kStreams;
  for (int64_t i = 0; i < part; i += 4 * int64_t(sizeof(Line)))
    for (int s = 0; s < kStreams; ++s) {
      const Line* v = reinterpret_cast<const Line*>(p + s * part + i);
#define PK_LOAD(i)        \
  const Line v##i = v[i]; \
  PK_USE(v##i)
      PK_LOAD(0) PK_LOAD(1) PK_LOAD(2) PK_LOAD(3)
    }
}

inline void store_past_caches(Line* to, Line v) {
#if defined(__AVX512F__)
  _mm512_stream_si512(to, v);
#elif defined(__AVX2__)
  _mm256_stream_si256(to, v);
#elif defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), reinterpret_cast<__m128i&>(v));
#else
  *to = v;
#endif
}

void copy_piece(const char* from, char* to, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += sizeof(Line))
    store_past_caches(reinterpret_cast<Line*>(to + i), *reinterpret_cast<const Line*>(from + i));
#if defined(__SSE2__)
  asm volatile("sfence" ::: "memory");
#else
  asm volatile("" ::: "memory");
#endif
}

// Anonymous pages, huge where the system grants it: with 4 KiB pages the probe measures the TLB.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) : bytes_(bytes) {
#ifdef __linux__
    void* p = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    madvise(p, size_t(bytes), MADV_HUGEPAGE);
    data_ = static_cast<char*>(p);
#else
    data_ = static_cast<char*>(std::aligned_alloc(kPage, size_t(bytes)));
    if (!data_) throw std::bad_alloc();
#endif
  }
  ~Buffer() {
#ifdef __linux__
    munmap(data_, size_t(bytes_));
#else
    std::free(data_);
#endif
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_;
  char* data_;
};

// ---- timing -----------------------------------------------------------------------------------------------------
// One cache line per thread for what it alone writes.
struct alignas(128) Span {
  double first = 0, last = 0;
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// What one sample took. They start together, once all are awake: waking a team costs more than a short sample, and is no
// part of a ceiling.
struct Timing {
  double seconds = 0;  // from the first start to the last end
  double rates = 0;    // rounds per second, each thread by its own clock, summed
};

template <class Body>
Timing timed(int threads, int64_t rounds, Body&& body) {
  std::vector<Span> spans(size_t(team().size()));
  team().run(
      [&](int tid) {
        if (team().size() > 1) team().barrier();
        if (tid >= threads) return;
        spans[size_t(tid)].first = now();
        for (int64_t r = 0; r < rounds; ++r) body(tid);
        spans[size_t(tid)].last = now();
      },
      Team::Start::together);
  spans.resize(size_t(threads));
  double first = spans[0].first, last = spans[0].last;
  Timing t;
  for (const Span& span : spans) {
    first = std::min(first, span.first);
    last = std::max(last, span.last);
    t.rates += double(rounds) / std::max(span.last - span.first, 1e-9);
  }
  t.seconds = last - first;
  return t;
}

void check(const Probe& probe) {
  if (probe.threads < 1 || probe.threads > team().size())
    throw std::invalid_argument("threads must be in [1, " + std::to_string(team().size()) + "], got " + std::to_string(probe.threads));
  if (probe.samples < 1 || !(probe.seconds > 0)) throw std::invalid_argument("samples and seconds must be positive");
}

// Rates, in units per second, of a body that does `unit` of work per round and thread. What threads share (`together`) is
// judged by the time that all needed; what each has of its own by the sum of their rates, which stands even where a busy
// machine never lets them run at the same moment. Samples are short: a long one always holds somebody else's time slice.
// Rounds double until the best of three runs, which no neighbour delayed, lasts as long as a sample should.
template <class Body>
std::vector<double> sampled(const Probe& probe, bool together, double unit, Body&& body) {
  int64_t rounds = 1;
  for (double best = 0;; rounds *= 2) {
    best = timed(probe.threads, rounds, body).seconds;
    for (int i = 0; i < 2; ++i) best = std::min(best, timed(probe.threads, rounds, body).seconds);
    if (best > probe.seconds * 0.7) break;
  }
  std::vector<double> rates;
  for (int i = 0; i < probe.samples; ++i) {
    const Timing t = timed(probe.threads, rounds, body);
    rates.push_back(unit * (together ? double(rounds) * probe.threads / t.seconds : t.rates));
  }
  return rates;
}

// Where each thread is in its part of a buffer that is swept in pieces, again and again; one cache line per thread.
struct alignas(128) Cursor {
  int64_t at = 0;
  int64_t next(int64_t piece, int64_t part) {
    const int64_t here = at;
    at = at + piece < part ? at + piece : 0;
    return here;
  }
};

struct Sweep {
  int64_t piece, part;  // part: bytes per thread, a whole number of pieces
  explicit Sweep(int64_t bytes_per_thread) {
    if (bytes_per_thread < kPage) throw std::invalid_argument("bytes_per_thread must be at least " + std::to_string(kPage));
    piece = std::min(kPiece, bytes_per_thread / kPage * kPage);
    part = bytes_per_thread / piece * piece;
  }
};

void touch(const Buffer& buffer, int threads) {  // by the thread that will read it, which places the pages near it
  const int64_t part = buffer.bytes() / threads;
  team().run(
      [&](int tid) {
        if (tid < threads) std::memset(buffer.data() + part * tid, 1, size_t(part));
      },
      Team::Start::together);
}

}  // namespace

std::vector<double> probe_read(int64_t bytes_per_thread, bool shared, const Probe& probe) {
  check(probe);
  const Sweep sweep(bytes_per_thread);
  const Buffer buffer(sweep.part * probe.threads);
  touch(buffer, probe.threads);
  std::vector<Cursor> cursors(size_t(probe.threads));
  return sampled(probe, shared, double(sweep.piece), [&](int tid) {
    read_piece(buffer.data() + sweep.part * tid + cursors[size_t(tid)].next(sweep.piece, sweep.part), sweep.piece);
  });
}

std::vector<double> probe_copy(int64_t bytes_per_thread, const Probe& probe) {
  check(probe);
  const Sweep sweep(bytes_per_thread);
  const Buffer from(sweep.part * probe.threads), to(sweep.part * probe.threads);
  touch(from, probe.threads);
  touch(to, probe.threads);
  std::vector<Cursor> cursors(size_t(probe.threads));
  return sampled(probe, true, 2.0 * double(sweep.piece), [&](int tid) {
    const int64_t at = sweep.part * tid + cursors[size_t(tid)].next(sweep.piece, sweep.part);
    copy_piece(from.data() + at, to.data() + at, sweep.piece);
  });
}

std::vector<std::string> compute_kinds() {
  std::vector<std::string> names;
  for (const Peak& peak : kPeaks) names.emplace_back(peak.name);
  return names;
}

std::vector<double> probe_compute(const std::string& kind, const Probe& probe) {
  check(probe);
  constexpr int64_t kLoops = 1000;  // per round: a few microseconds
  for (const Peak& peak : kPeaks)
    if (kind == peak.name) return sampled(probe, false, peak.ops_per_loop * double(kLoops), [&](int) { peak.run(kLoops); });
  throw std::invalid_argument("this level has no " + kind + " peak");
}

}  // namespace pk
