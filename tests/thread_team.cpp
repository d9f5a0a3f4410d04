// A team of threads under load: every part of a run is done once, whoever does it; barriers hold; shares add up; and a worker that
// has overslept a run, or several, does nothing of them. So it is on the threads of an OpenMP runtime, of which there may be fewer.
// Prints what broke.
#include <cstdio>
#include <cstdlib>

#include "threads.h"

using namespace pk;

int broken(const char* what, int run) {
  std::printf("%s in run %d\n", what, run);
  return 1;
}

// A runtime that has as many threads as `granted`, at most.
int granted = 0;
thread_local int own = 0, present = 1;

void parallel(void (*body)(void*), void* given, unsigned threads, unsigned) {
  const int count = std::min(int(threads), granted);
  std::vector<std::thread> others;
  const auto part = [&](int thread) {
    own = thread;
    present = count;
    body(given);
    own = 0;
    present = 1;
  };
  for (int thread = 1; thread < count; ++thread) others.emplace_back(part, thread);
  part(0);
  for (auto& other : others) other.join();
}

// Arguments: threads, runs, and of the runtime's threads how many there are (0: run on our own).
int main(int, char** argv) {
  const int size = std::atoi(argv[1]), runs = std::atoi(argv[2]);
  granted = std::atoi(argv[3]);
  Team team(size);
  std::vector<long> done(size_t(size), 0), before(size_t(size), 0), sums(size_t(size), 0);
  long by_caller = 0;
  const auto caller = std::this_thread::get_id();
  for (int run = 1; run <= runs; ++run) {
    if (granted && run % 5 == 1) team.borrow({parallel, [] { return present; }, [] { return own; }});
    if (granted && run % 5 == 0) team.borrow({});
    team.run([&](int tid) {
      ++done[size_t(tid)];
      if (tid && std::this_thread::get_id() == caller) ++by_caller;
      for (volatile int i = 0; i < (run * 7 + tid * 13) % 97; i = i + 1) {}
    });
    for (long times : done)
      if (times != run) return broken("a part was not done once", run);
    team.run(
        [&](int tid) {
          before[size_t(tid)] = run;
          team.barrier();
          sums[size_t(tid)] = 0;
          for (long x : before) sums[size_t(tid)] += x;
        },
        Team::Start::together);
    for (long sum : sums)
      if (sum != long(run) * size) return broken("a barrier did not hold", run);
    std::atomic<long> total{0};
    team.run(
        [&](int tid) {
          team.shares().take(tid, 3, [&](int64_t i, int64_t end) {
            for (; i < end; ++i) total += i;
          });
        },
        Team::Start::apart, 100);
    if (total != 4950) return broken("shares do not add up", run);
    if (run % 97 == 0) std::this_thread::sleep_for(std::chrono::microseconds(700));  // long enough to sleep in
  }
  std::printf("%ld parts done by the caller\n", by_caller);
  return 0;
}
