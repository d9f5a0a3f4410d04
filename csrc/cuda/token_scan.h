// The first pass of sampling and of draft verification: every chunk of every row in parallel.
#pragma once
#include <algorithm>

#include "device/token_row.cuh"
#include "kernels.h"

namespace pk::cuda {

constexpr int kScanThreads = 256, kChunk = kScanThreads * device::kFloats;
constexpr uint32_t kInPrompt = 1u << 30;  // beside the number of times that a token stands in the output

// What a chunk of a row knows without the others. The logits are those after bias, mask and penalties; `raw`, as given.
struct ChunkStats {
  uint64_t first;   // token: the first of the order
  uint64_t winner;  // (score, id) of the Gumbel-max winner among all of the chunk; the score is relative to its top
  float mass;       // sum of exp((y - chunk's top) / temperature)
  float raw_top, raw_mass;
  uint32_t bad;  // holds a NaN
};

// How a row is changed before it is filtered.
struct Adjustment {
  const float *bias = nullptr, *repetition = nullptr, *presence = nullptr, *frequency = nullptr;
  const uint8_t* allowed = nullptr;
  int64_t bias_row = 0, allowed_row = 0, repetition_stride = 0, presence_stride = 0, frequency_stride = 0;
  uint32_t* rows = nullptr;  // [rows, row_size]: in, how often tokens occur (where `counted`); out, the logits' bits
  int64_t row_size = 0;
  bool counted = false;
};

struct Scan {
  const void* logits;
  DType type;
  int64_t row_stride;
  bool wide;
  int vocab, rows;
  const float* temperature;
  const int64_t *seeds = nullptr, *positions = nullptr;  // null: no draw
  const int32_t* cu_draft = nullptr;                     // whose rows these are; null: each its own
  int64_t temperature_stride, seed_stride = 0, position_stride = 0, cu_stride = 0;
  int requests = 0;
  bool raw = false;  // wants raw_top, raw_mass
  Adjustment adjust;
  ChunkStats* stats;  // [rows, chunks]
};

// A block for each row: latency counts where rows are few. Kernels ask for one block per multiprocessor, or else the compiler
// spills to fit as many as shared memory has room for.
constexpr int kRowThreads = 512;
inline dim3 row_threads(int vocab) {
  const int needed = (vocab + device::kFloats - 1) / device::kFloats;
  return dim3(static_cast<unsigned>(std::min((needed + 31) / 32 * 32, kRowThreads)));
}

inline int64_t chunks_of(int64_t vocab) { return (vocab + kChunk - 1) / kChunk; }
cudaError_t scan_tokens(const Scan&, const Launch&);

}  // namespace pk::cuda
