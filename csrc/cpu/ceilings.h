// What this machine can do at most, measured on our own thread team with the instructions of this ISA level.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace pk {

// How to measure: `threads` of the team work, the others wait. Each of `samples` lasts about `seconds`.
struct Probe {
  int threads;
  int samples;
  double seconds;
};

// Bytes per second read from a buffer of `bytes_per_thread` for each thread, swept again and again. `shared`: the level
// that serves it is one for all threads.
std::vector<double> probe_read(int64_t bytes_per_thread, bool shared, const Probe&);

// Bytes per second, reads and writes counted, of a copy from one such buffer to another (past the caches where it can).
std::vector<double> probe_copy(int64_t bytes_per_thread, const Probe&);

// Kinds of arithmetic that this level has an instruction for; the names that probe_compute takes.
std::vector<std::string> compute_kinds();

// Operations per second, a multiply-add counted as two. Unknown kind: std::invalid_argument.
std::vector<double> probe_compute(const std::string& kind, const Probe&);

}  // namespace pk
