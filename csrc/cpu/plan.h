// A recorded sequence of ops with their parameter blocks, replayed in one native call: the CPU's CUDA graph.
// Buffers keep their addresses; what changes between steps (ids, lengths, block tables) changes inside them.
#pragma once
#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace pk {

class Plan {
 public:
  template <class P>
  void add(void (*kernel)(const P&), const P& params) {
    steps_.emplace_back([kernel, params] { kernel(params); });
  }
  int64_t size() const { return int64_t(steps_.size()); }

  void run() const {
    for (const auto& step : steps_) step();
  }
  // Seconds that each op took.
  std::vector<double> run_timed() const {
    std::vector<double> seconds;
    seconds.reserve(steps_.size());
    for (const auto& step : steps_) {
      const auto start = std::chrono::steady_clock::now();
      step();
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return seconds;
  }

 private:
  std::vector<std::function<void()>> steps_;
};

}  // namespace pk
