// Runs the fibers of a block, and the blocks of a launch.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>

#include "block.h"
#include "wgmma_queue.h"

namespace emu {
namespace {

constexpr size_t kStackBytes = 256 << 10;   // g++ keeps register arrays in memory: a frame may take tens of KiB
constexpr size_t kSharedLimit = 227 << 10;  // the most an sm_90 block can have
constexpr size_t kSharedGuard = 64 << 10;   // before and after: catches indices that are off by a tile
// A spin loop that nobody ends. Alone, only this block's threads could; with other workers, their blocks might.
constexpr uint64_t kMaxIdleYieldsAlone = 100'000, kMaxIdleYields = 20'000'000;

}  // namespace

constinit thread_local Block* current_block = nullptr;
constinit thread_local Fiber* current_fiber = nullptr;

const ThreadContext& self() { return *current_fiber; }

Block::Block() {
  const size_t total = kSharedLimit + 2 * kSharedGuard;
  void* base = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) std::abort();
  shared = static_cast<unsigned char*>(base) + kSharedGuard;
  shared_capacity = kSharedLimit + kSharedGuard;
}

Block::~Block() { munmap(shared - kSharedGuard, kSharedLimit + 2 * kSharedGuard); }

uint64_t Block::random() {  // xorshift64
  rng ^= rng << 13;
  rng ^= rng >> 7;
  rng ^= rng << 17;
  return rng;
}

void Block::make_ready(Fiber& f) {
  f.state = State::ready;
  ready[f.thread >> 6] |= 1ull << (f.thread & 63);
}

// The next fiber to run, by schedule; null when none can.
Fiber* Block::next() {
  const int words = static_cast<int>(ready.size());
  const auto upwards = [&](int from) {
    if (from >= threads) from = 0;
    int word = from >> 6;
    uint64_t bits = ready[word] & ~0ull << (from & 63);
    for (int tried = 0; tried <= words; tried++) {
      if (bits) return (word << 6) + __builtin_ctzll(bits);
      word = (word + 1) % words;
      bits = ready[word];
    }
    return -1;
  };
  const auto downwards = [&](int from) {
    if (from < 0) from = threads - 1;
    int word = from >> 6;
    uint64_t bits = ready[word] & ~0ull >> (63 - (from & 63));
    for (int tried = 0; tried <= words; tried++) {
      if (bits) return (word << 6) + 63 - __builtin_clzll(bits);
      word = (word + words - 1) % words;
      bits = ready[word];
    }
    return -1;
  };
  const auto pick = [&] {
    switch (settings.schedule) {
      case Schedule::forward:
        return upwards(last + 1);
      case Schedule::reverse:
        return downwards(last - 1);
      default:
        return upwards(static_cast<int>(random() % threads));
    }
  };
  if (aborted) return nullptr;
  if (!deliveries.empty() && settings.schedule == Schedule::random && random() % 64 == 0) deliver_one();
  int chosen = pick();
  while (chosen < 0 && deliver_one()) chosen = pick();
  if (chosen < 0 || aborted) return nullptr;
  last = chosen;
  return fibers[chosen].get();
}

void Block::switch_to(Fiber* to, Context& from) {
  counters.switches++;
  current_fiber = to;
  switch_context(from, to ? to->context : scheduler);
}

void Block::block_current(State state, const char* what, Site where) {
  Fiber* me = current_fiber;
  me->state = state;
  me->waits_for = what;
  me->waits_at = where;
  ready[me->thread >> 6] &= ~(1ull << (me->thread & 63));
  Fiber* to = next();
  if (to != me) switch_to(to, me->context);
}

void Block::yield_current(Site where) {
  Fiber* me = current_fiber;
  me->waits_for = "a spin loop";
  me->waits_at = where;
  if (++idle_yields > (settings.workers == 1 ? kMaxIdleYieldsAlone : kMaxIdleYields)) {
    if (!aborted) fault(FaultKind::livelock, where, 0, -1, "a spin loop that no thread ends");
    abort_block();
  }
  if (idle_yields % 1024 == 0) std::this_thread::yield();  // another worker's block may be the one that ends it
  if (!deliveries.empty() && idle_yields % 64 == 0) deliver_one();
  Fiber* to = next();
  if (to != me) switch_to(to, me->context);
}

static Site bulk_site(const Fiber& f) {
  return f.bulk_uncommitted.empty() ? f.bulk_groups.front().front().where : f.bulk_uncommitted.front().where;
}

void Block::thread_exits() {
  Fiber* me = current_fiber;
  me->state = State::done;
  ready[me->thread >> 6] &= ~(1ull << (me->thread & 63));
  live--;
  idle_yields = 0;
  warps[me->warp].alive &= ~(1u << me->lane);
  if (settings.strict) {
    const PendingCopy* left = !me->uncommitted.empty() ? &me->uncommitted.front() : nullptr;
    for (const auto& group : me->groups) {
      if (!left && !group.empty()) left = &group.front();
    }
    const bool stores = !me->bulk_uncommitted.empty() || !me->bulk_groups.empty();
    if (stores)
      fault(FaultKind::unawaited_copy, bulk_site(*me), 0, -1, "the thread exits with a bulk store whose source it never waited for");
    if (left) fault(FaultKind::unawaited_copy, left->where, 0, -1, "the thread exits with an asynchronous copy it never waited for");
  }
  collective_exit(*me);
  barrier_exit(*me);
  switch_to(next(), me->context);
}

static void fiber_main() {
  const LaunchSpec& spec = *current_block->spec;
  spec.entry(spec.closure);
  current_block->thread_exits();
  std::abort();  // a finished fiber is never resumed
}

void Block::prepare(uint3 index) {
  const dim3 size = spec->block;
  warps.assign((threads + 31) / 32, Warp());
  ready.assign((threads + 63) / 64, 0);
  while (static_cast<int>(fibers.size()) < threads) fibers.push_back(std::make_unique<Fiber>(kStackBytes));
  for (int i = 0; i < threads; i++) {
    Fiber& f = *fibers[i];
    const unsigned t = static_cast<unsigned>(i);
    f.thread_index = {t % size.x, t / size.x % size.y, t / (size.x * size.y)};
    f.block_index = index;
    f.block_dim = size;
    f.grid_dim = spec->grid;
    f.shared = shared;
    f.shared_bytes = shared_bytes;
    f.thread = i;
    f.lane = i & 31;
    f.warp = i >> 5;
    f.uncommitted.clear();
    f.groups.clear();
    f.accumulators.clear();
    f.bulk_uncommitted.clear();
    f.bulk_groups.clear();
    warps[f.warp].alive |= 1u << f.lane;
    emu::prepare(f.context, f.stack, fiber_main);
    make_ready(f);
  }
}

void Block::release() {
  for (Barrier& b : barriers) {
    clocks.clear(b.gathered);
    b = Barrier();
  }
  for (auto& [address, m] : mbarriers) {
    clocks.clear(m.gathered);
    clocks.drop(m.completed);
  }
  mbarriers.clear();
  for (Delivery& d : deliveries) clocks.drop(d.history);
  deliveries.clear();
  for (auto& queue : wgmma) queue.reset();
  store_slots.clear();
}

void Block::run(const LaunchSpec& launch, uint3 index, uint64_t seed) {
  spec = &launch;
  settings = config();
  threads = live = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  aborted = false;
  idle_yields = 0;
  rng = seed * 0x9e3779b97f4a7c15ull | 1;
  shared_bytes = launch.shared_bytes;
  std::memset(shared, 0xff, shared_bytes);
  const Module module = module_of(launch.kernel);
  static_shared = module.thread_local_base;
  static_bytes = module.thread_local_bytes;
  module_low = module.low;
  module_high = module.high;
  clocks.reset(threads);
  shadow.reset(shared_bytes);
  static_shadow.reset(static_bytes);
  proxy_fenced.assign(threads, 0);
  if (settings.profile) profile.reset((threads + 31) / 32);
  prepare(index);
  last = settings.schedule == Schedule::forward ? threads - 1 : 0;
  current_block = this;
  if (Fiber* first = next()) switch_to(first, scheduler);
  current_fiber = nullptr;
  if (live > 0 && !aborted) report_stuck();
  if (live > 0)
    aborted = true;
  else if (settings.strict)
    report_unfinished();
  current_block = nullptr;
  if (settings.profile) profile.finish(counters);
  counters.blocks++;
  release();
}

// Nobody can run and not everybody is done: says who waits for what, and where.
void Block::report_stuck() {
  struct Group {
    int first, last;
    const Fiber* example;
  };
  std::vector<Group> groups;
  for (int i = 0; i < threads; i++) {
    const Fiber& f = *fibers[i];
    if (f.state == State::done) continue;
    if (!groups.empty() && groups.back().last == i - 1 && groups.back().example->waits_at == f.waits_at)
      groups.back().last = i;
    else
      groups.push_back({i, i, &f});
  }
  std::string text = "no thread can run; " + std::to_string(threads - live) + " of " + std::to_string(threads) + " exited";
  std::vector<Site> sites;
  for (const Group& g : groups) sites.push_back(g.example->waits_at);
  const auto where = locate(sites);
  constexpr size_t kShown = 8;
  for (size_t i = 0; i < groups.size() && i < kShown; i++) {
    const Location& at = where.at(groups[i].example->waits_at);
    text += "; threads " + std::to_string(groups[i].first) + "-" + std::to_string(groups[i].last) + " wait for " +
            groups[i].example->waits_for + " at " + at.file + ":" + std::to_string(at.line);
  }
  if (groups.size() > kShown) text += "; and " + std::to_string(groups.size() - kShown) + " more groups";
  const Fiber* example = groups.front().example;
  const Site other = groups.size() > 1 ? groups.back().example->waits_at : 0;
  if (!Recorder::instance().first(FaultKind::deadlock, example->waits_at)) return;
  const uint3 b = example->block_index;
  Recorder::instance().record({FaultKind::deadlock, text, example->waits_at, other, {b.x, b.y, b.z}, {groups.front().first}, 1});
}

// What a block leaves behind that the hardware would let pass: a wrong count shows here even where the order hid it.
void Block::report_unfinished() {
  for (const Delivery& d : deliveries) { fault(FaultKind::unawaited_copy, d.where, 0, -1, "the block ends with a bulk copy in flight"); }
  for (const Barrier& barrier : barriers) {
    if (barrier.arrived == 0) continue;
    fault(FaultKind::barrier_divergence, barrier.where, 0, barrier.first_thread,
          "the block ends with %d of %d threads arrived at barrier %d, and nobody waiting", barrier.arrived, barrier.needed,
          static_cast<int>(&barrier - barriers));
  }
  for (const auto& [address, m] : mbarriers) {
    if (m.pending == m.expected && m.bytes == 0) continue;
    fault(FaultKind::mbarrier, m.where, 0, -1,
          "the block ends within a phase of the mbarrier at shared offset %u: %d of %d arrivals, %lld bytes to come", address,
          m.expected - m.pending, m.expected, static_cast<long long>(m.bytes));
  }
}

void Block::fault(FaultKind kind, Site where, Site other, int other_thread, const char* format, ...) {
  if (!Recorder::instance().first(kind, where)) return;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  const Fiber* me = current_fiber ? current_fiber : fibers.front().get();
  RawFault f{kind, text, where, other, {me->block_index.x, me->block_index.y, me->block_index.z}, {me->thread}, 1};
  if (other_thread >= 0) f.threads.push_back(other_thread);
  Recorder::instance().record(std::move(f));
}

namespace {

// Blocks are expensive to make (stacks): workers borrow them.
class Pool {
 public:
  std::unique_ptr<Block> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return std::make_unique<Block>();
    auto b = std::move(free_.back());
    free_.pop_back();
    return b;
  }
  void give(std::unique_ptr<Block> b) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(b));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> free_;
};

cudaError_t refuse(const char* why) {
  Recorder::instance().record({FaultKind::invalid_launch, why, 0, 0, {0, 0, 0}, {}, 1});
  return cudaErrorInvalidConfiguration;
}

}  // namespace

cudaError_t launch(const LaunchSpec& spec) {
  const dim3 g = spec.grid, b = spec.block;
  const uint64_t blocks = static_cast<uint64_t>(g.x) * g.y * g.z, threads = static_cast<uint64_t>(b.x) * b.y * b.z;
  if (threads == 0 || threads > kMaxThreads || b.z > 64) return refuse("a block has 1 to 1024 threads, at most 64 in z");
  if (blocks == 0 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535)
    return refuse("a grid has at least one block, at most 65535 in y and z");
  if (spec.shared_bytes > kSharedLimit) return refuse("more than 227 KiB of dynamic shared memory");
  const Config& settings = config();
  std::vector<uint64_t> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  if (settings.schedule == Schedule::reverse) std::reverse(order.begin(), order.end());
  if (settings.schedule == Schedule::random) {
    uint64_t r = settings.seed * 0x9e3779b97f4a7c15ull | 1;
    for (uint64_t i = blocks; i > 1; i--) {
      r ^= r << 13, r ^= r >> 7, r ^= r << 17;
      std::swap(order[i - 1], order[r % i]);
    }
  }
  static Pool pool;
  std::atomic<uint64_t> taken{0};
  std::atomic<bool> failed{false};
  const auto work = [&] {
    std::unique_ptr<Block> runner = pool.take();
    runner->counters = Counters{};
    ProfileTable sites;
    for (uint64_t i; (i = taken++) < blocks;) {
      const uint64_t n = order[i];
      const uint3 index{static_cast<unsigned>(n % g.x), static_cast<unsigned>(n / g.x % g.y),
                        static_cast<unsigned>(n / (static_cast<uint64_t>(g.x) * g.y))};
      runner->run(spec, index, settings.seed * 1000003 + n + 1);
      if (runner->aborted) failed = true;
      if (settings.profile) Recorder::instance().add(Counters{}, runner->profile.table);
    }
    Recorder::instance().add(runner->counters, sites);
    pool.give(std::move(runner));
  };
  uint64_t workers = settings.workers > 0 ? static_cast<uint64_t>(settings.workers) : std::thread::hardware_concurrency();
  workers = std::min(workers, blocks);
  std::vector<std::thread> helpers;
  for (uint64_t i = 1; i < workers; i++) helpers.emplace_back(work);
  work();
  for (std::thread& t : helpers) t.join();
  Counters one{};
  one.launches = 1;
  Recorder::instance().add(one, {});
  return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

}  // namespace emu
