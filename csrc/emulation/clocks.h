// Happens-before between the threads of a block: one vector clock per thread, shared copy-on-synchronise.
//
// Threads that meet at a barrier see the same history afterwards, so they share one immutable Snapshot; a barrier of n
// threads costs n updates, not n * n. Asynchronous engines (a TMA copy on its mbarrier, the wgmmas of a warpgroup) have clocks
// of their own behind the threads': what they touched is ordered only for those who waited for them.
#pragma once
#include <cstdint>
#include <vector>

namespace emu {

inline constexpr int kMaxThreads = 1024;
inline constexpr int kMbarrierEngines = 64, kWarpgroupEngines = 8, kStoreEngines = 8;
inline constexpr int kEngines = kMbarrierEngines + kWarpgroupEngines + kStoreEngines;

struct Snapshot {
  int references;
  uint32_t seen[1];  // [threads + engines]
};

class Clocks {
 public:
  // What a barrier has gathered from those who arrived.
  struct Gathering {
    Snapshot* sum = nullptr;
    Snapshot* last = nullptr;  // the view joined last: the threads of a warp usually share it
  };

  ~Clocks();
  void reset(int threads);
  int threads() const { return threads_; }
  int mbarrier_engine(int slot) const { return threads_ + slot % kMbarrierEngines; }
  int warpgroup_engine(int group) const { return threads_ + kMbarrierEngines + group % kWarpgroupEngines; }
  int store_engine(int slot) const { return threads_ + kMbarrierEngines + kWarpgroupEngines + slot % kStoreEngines; }

  uint32_t now(int who) const { return clock_[who]; }
  uint32_t tick(int who) { return ++clock_[who]; }
  // Did what `other` did at its time `clock` happen before `me`, now?
  bool ordered(int me, int other, uint32_t clock) const { return me == other || view_[me]->seen[other] >= clock; }

  void release(int thread, Gathering& into);  // all that `thread` did or saw so far
  void merge(const Snapshot* history, Gathering& into);
  void add(int engine, uint32_t clock, Gathering& into);  // what an engine did up to `clock`
  void adopt(int thread, const Gathering& gathered);      // after a barrier that `thread` itself released into
  void acquire(int thread, Snapshot* gathered);           // after a wait that it did not
  void acquire(int thread, int engine, uint32_t clock);
  void clear(Gathering& gathering);
  Snapshot* share(Snapshot* s) {
    if (s) s->references++;
    return s;
  }
  void drop(Snapshot* s);
  Snapshot* view(int thread) const { return view_[thread]; }

 private:
  Snapshot* fresh(const Snapshot* copy);
  void assign(int thread, Snapshot* s);
  void forget();

  int threads_ = 0, width_ = 0;
  std::vector<uint32_t> clock_;
  std::vector<Snapshot*> view_, pool_;
  Snapshot *cached_view_ = nullptr, *cached_gathered_ = nullptr, *cached_result_ = nullptr;
};

}  // namespace emu
