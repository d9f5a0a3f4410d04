// A block being run: its fibers and everything they share. Internal to the runtime.
#pragma once
#include <cstdarg>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "clocks.h"
#include "device.h"
#include "emu.h"
#include "fiber.h"
#include "profile.h"
#include "recorder.h"
#include "shadow.h"
#include "site.h"

namespace emu {

enum class State : uint8_t { ready, in_warp_collective, in_barrier, in_mbarrier, done };

// A cp.async that has been issued and not landed.
struct PendingCopy {
  uint32_t to;
  int bytes;
  unsigned char data[16];
  Site where;
};

// A TMA store that has been issued and whose source may not be overwritten.
struct PendingStore {
  const TensorMap* map;
  int coordinates[5];
  uint32_t from, bytes;
  int engine;
  uint32_t clock;
  Site where;
};

struct Fiber : ThreadContext {
  explicit Fiber(size_t stack_bytes) : stack(stack_bytes) {}
  Stack stack;
  Context context;
  State state = State::done;
  int thread = 0, lane = 0, warp = 0;
  const char* waits_for = "";  // while not ready
  Site waits_at = 0;
  int barrier = 0;
  uint32_t mbarrier = 0;
  int parity = 0;
  int votes = 0, voters = 0;  // of the barrier passed last
  std::vector<PendingCopy> uncommitted;
  std::deque<std::vector<PendingCopy>> groups;
  std::vector<std::pair<const unsigned char*, const unsigned char*>> accumulators;  // held by wgmmas in flight
  std::vector<PendingStore> bulk_uncommitted;
  std::deque<std::vector<PendingStore>> bulk_groups;
};

class Block;
struct Collective {
  int operation = 0;
  unsigned mask = 0, arrived = 0;
  Site where = 0;
  const char* what = "";
  void (*execute)(Block&, int, const Collective&, unsigned) = nullptr;
  void* argument[32] = {};
};

struct Warp {
  unsigned alive = 0;
  std::vector<Collective> open;
};

struct Barrier {
  int arrived = 0, needed = 0;
  bool counted = false;  // a named barrier with a thread count, not __syncthreads
  Site where = 0;
  int first_thread = -1;
  Clocks::Gathering gathered;
  std::vector<Fiber*> waiting;
  int votes = 0;  // of __syncthreads_count and its kin
};

struct Mbarrier {
  int expected = 0, pending = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
  int slot = 0;
  Site where = 0;
  int init_thread = 0;
  uint32_t init_clock = 0;
  Clocks::Gathering gathered;
  Snapshot* completed = nullptr;
};

// Bytes on their way into shared memory, or an arrival that waits for some.
struct Delivery {
  uint32_t to = 0;
  std::vector<unsigned char> data;
  uint32_t mbarrier = 0;
  int engine = -1;
  uint32_t clock = 0;  // the engine's, or for an arrival its thread's
  int thread = 0;
  bool arrives = false;  // cp.async copies that end in an arrival
  std::vector<PendingCopy> copies;
  Snapshot* history = nullptr;  // of the arriving thread
  Site where = 0;
};

struct WgmmaQueue;

class Block {
 public:
  Block();
  ~Block();
  void run(const LaunchSpec& spec, uint3 index, uint64_t seed);

  // -- scheduling ------------------------------------------------------------------------------------------------
  Fiber& fiber(int thread) { return *fibers[thread]; }
  void make_ready(Fiber& f);
  void block_current(State state, const char* what, Site where);  // returns when made ready, or never if aborted
  void yield_current(Site where);
  void thread_exits();
  uint64_t random();

  // -- faults ----------------------------------------------------------------------------------------------------
  void fault(FaultKind kind, Site where, Site other, int other_thread, const char* format, ...) __attribute__((format(printf, 6, 7)));
  void conflict(const Conflict& c, const char* space, size_t offset, size_t n, Site where, int thread);
  void abort_block() { aborted = true; }

  // -- shared memory ---------------------------------------------------------------------------------------------
  // False (and a fault) if [offset, offset + n) is not inside dynamic shared memory or not aligned.
  bool check_shared(uint32_t offset, size_t n, size_t alignment, const char* what, Site where);
  void touch(Touch touch, uint32_t offset, size_t n, Site where);
  void touch_as(const Toucher& by, uint32_t offset, size_t n);
  void touch_static(Touch touch, size_t offset, size_t n, Site where);

  // -- barriers, in barrier.cpp -----------------------------------------------------------------------------------
  void barrier_exit(Fiber& leaver);
  void collective_exit(Fiber& leaver);
  void complete(Barrier& b);

  // -- deliveries, in mbarrier.cpp --------------------------------------------------------------------------------
  bool deliver_one();
  void deliver(Delivery& d);
  void send(Delivery d);  // queues, or delivers at once under AsyncMode::eager
  int store_engine(int thread);
  Mbarrier* find_mbarrier(uint32_t address, Site where);
  void flip_if_complete(uint32_t address, Mbarrier& m);

  const LaunchSpec* spec = nullptr;
  Config settings;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::map<uint32_t, Mbarrier> mbarriers;
  std::vector<Delivery> deliveries;
  std::unique_ptr<WgmmaQueue> wgmma[kMaxThreads / 128];
  std::unordered_map<int, int> store_slots;  // thread -> engine

  int threads = 0, live = 0;
  bool aborted = false;
  unsigned char* shared = nullptr;
  size_t shared_bytes = 0, shared_capacity = 0;
  unsigned char* static_shared = nullptr;  // the kernel module's thread-local block
  size_t static_bytes = 0;
  const unsigned char *module_low = nullptr, *module_high = nullptr;

  Clocks clocks;
  Shadow shadow, static_shadow;
  std::vector<uint32_t> proxy_fenced;
  Counters counters{};
  Profile profile;

 private:
  Fiber* next();
  void switch_to(Fiber* to, Context& from);
  void prepare(uint3 index);
  void release();
  void report_stuck();
  void report_unfinished();

  Context scheduler;
  std::vector<uint64_t> ready;
  int last = 0;
  uint64_t rng = 1;
  uint64_t idle_yields = 0;
};

// What runs on this CPU thread; null outside a kernel.
extern constinit thread_local Block* current_block;
extern constinit thread_local Fiber* current_fiber;
inline Block* block() { return current_block; }
inline Fiber* fiber() { return current_fiber; }

// Static __shared__ variables: thread-local storage of the module that holds the kernel.
struct Module {
  unsigned char* thread_local_base;
  size_t thread_local_bytes;
  const unsigned char *low, *high;
};
Module module_of(const void* kernel);

}  // namespace emu
