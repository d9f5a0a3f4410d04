#include "threads.h"

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <new>
#include <string>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pk {
namespace {

// A waiting thread first spins, longer than the imbalance of an op. Then it gives its CPU to whoever else wants it, for longer
// than the gap between two ops that Python calls one by one. Then it sleeps, and waking it costs tens of microseconds.
constexpr auto kSpin = std::chrono::microseconds(20), kYield = std::chrono::microseconds(400);
constexpr int kPauses = 32;  // between two looks at the clock

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void wait_while(std::atomic<uint32_t>& word, uint32_t value, std::atomic<int32_t>& parked) {
  const auto start = std::chrono::steady_clock::now();
  for (auto waited = start - start; waited < kYield; waited = std::chrono::steady_clock::now() - start) {
    for (int i = 0; i < kPauses; ++i) {
      if (word.load(std::memory_order_acquire) != value) return;
      relax();
    }
    if (waited > kSpin) std::this_thread::yield();
  }
  parked.fetch_add(1);
  while (word.load() == value) word.wait(value);
  parked.fetch_sub(1);
}

}  // namespace

Shares::Span Shares::from_front(std::atomic<Span>& range, uint32_t grain) {
  Span s = range.load(std::memory_order_relaxed);
  while (s.size()) {
    const Span taken{s.begin, s.begin + std::min(grain, s.size())};
    if (range.compare_exchange_weak(s, {taken.end, s.end}, std::memory_order_relaxed)) return taken;
  }
  return {};
}

Shares::Span Shares::from_fullest(uint32_t grain) {
  for (;;) {
    std::atomic<Span>* fullest = nullptr;
    Span s;
    for (Range& r : ranges_)
      if (const Span span = r.span.load(std::memory_order_relaxed); span.size() > s.size()) s = span, fullest = &r.span;
    if (!fullest) return {};
    const Span taken{s.end - std::min(grain, s.size()), s.end};
    if (fullest->compare_exchange_weak(s, {s.begin, taken.begin}, std::memory_order_relaxed)) return taken;
  }
}

Team::Team(int size) : size_(size), shares_(size), parts_(size_t(size)) {
  for (int tid = 1; tid < size; ++tid) threads_.emplace_back([this, tid] { worker(tid); });
}

Team::~Team() {
  stop_ = true;
  ++run_;
  run_.notify_all();
  for (auto& t : threads_) t.join();
}

void Team::barrier() {
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(size_)) {
    arrived_.store(0, std::memory_order_relaxed);
    epoch_.store(epoch + 1);
    if (parked_.load()) epoch_.notify_all();
    return;
  }
  wait_while(epoch_, epoch, parked_);
}

void Team::finish_part() {
  if (left_.fetch_sub(1) == 1 && parked_.load()) left_.notify_all();
}

void Team::borrow(const OpenMp& openmp) {
  std::lock_guard<std::mutex> lock(caller_);
  openmp_ = openmp;
}

void Team::run_erased(Erased fn, void* body, Start start, int64_t shared) {
  std::lock_guard<std::mutex> lock(caller_);
  const uint32_t saved = flush_denormals();
  fn_ = fn;
  body_ = body;
  for (int tid = 0; shared && tid < size_; ++tid) shares_.reset(tid, shared);
  if (size_ == 1)
    fn(body, 0);
  else if (!openmp_.parallel || !run_borrowed(start))
    run_ours(start);
  restore_denormals(saved);
}

void Team::run_ours(Start start) {
  uint32_t number = run_.load(std::memory_order_relaxed) + 1;
  if (number == kBorrowed) number = 1;  // 0 marks a part that is taken
  left_.store(uint32_t(size_ - 1), std::memory_order_relaxed);
  for (int tid = 1; tid < size_; ++tid) parts_[size_t(tid)].number.store(number, std::memory_order_relaxed);
  run_.store(number);
  if (parked_.load()) run_.notify_all();
  fn_(body_, 0);
  for (int tid = 1; tid < size_ && start == Start::apart; ++tid)
    if (claim(tid, number)) {
      fn_(body_, tid);
      finish_part();
    }
  for (uint32_t left; (left = left_.load()) != 0;) wait_while(left_, left, parked_);
}

// False when the pool has too few threads for parts that wait for each other, as it has for a caller that is one of its threads.
bool Team::run_borrowed(Start start) {
  struct Run {
    Team& team;
    Start start;
    bool done;
  } run{*this, start, true};
  for (Part& part : parts_) part.number.store(kBorrowed, std::memory_order_relaxed);
  const auto thread = [](void* given) {
    Run& r = *static_cast<Run*>(given);
    Team& t = r.team;
    const int own = t.openmp_.thread();
    if (r.start == Start::together && t.openmp_.threads() < t.size_) {
      if (own == 0) r.done = false;
      return;
    }
    const uint32_t saved = flush_denormals();
    for (int i = 0; i < (r.start == Start::together ? 1 : t.size_); ++i) {
      const int tid = (own + i) % t.size_;
      if (t.claim(tid, kBorrowed)) t.fn_(t.body_, tid);
    }
    restore_denormals(saved);
  };
  openmp_.parallel(thread, &run, unsigned(size_), 0);
  return run.done;
}

void Team::worker(int tid) {
  flush_denormals();
  for (uint32_t number = 0;;) {
    wait_while(run_, number, parked_);
    number = run_.load();
    if (stop_) return;
    if (!claim(tid, number)) continue;  // the caller has done it
    fn_(body_, tid);
    finish_part();
  }
}

uint32_t Team::flush_denormals() {
#if defined(__x86_64__)
  const uint32_t saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);
  return saved;
#else
  return 0;
#endif
}

void Team::restore_denormals(uint32_t saved) {
#if defined(__x86_64__)
  _mm_setcsr(saved);
#else
  (void)saved;
#endif
}

namespace {
// CPUs granted by the cgroup (v2, then v1), rounded up; 0 when unlimited or unknown.
int quota_cpus() {
  std::string quota, period;
  if (std::ifstream f("/sys/fs/cgroup/cpu.max"); f >> quota >> period) {
    if (quota == "max") return 0;
  } else {
    std::ifstream q("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), p("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    if (!(q >> quota) || !(p >> period)) return 0;
  }
  const double cpus = std::atof(quota.c_str()) / std::max(1.0, std::atof(period.c_str()));
  return cpus > 0 ? int(cpus + 0.999) : 0;
}

OpenMp& openmp() {
  static OpenMp borrowed;
  return borrowed;
}

std::unique_ptr<Team>& holder() {
  static std::unique_ptr<Team> team;
#ifdef __linux__
  // A forked child has none of the threads: it forgets the team and makes its own on first use.
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    (void)holder().release();
    openmp() = {};
  });
  (void)registered;
#endif
  return team;
}
}  // namespace

int default_threads() {
  int n = int(std::thread::hardware_concurrency());
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
#endif
  if (const int quota = quota_cpus()) n = std::min(n, quota);
  return std::max(1, n);
}

Team& team() {
  auto& t = holder();
  if (!t) set_num_threads(default_threads());
  return *t;
}

void set_num_threads(int n) {
  auto& t = holder();
  if (t && t->size() == n) return;
  t.reset();
  t = std::make_unique<Team>(n);
  t->borrow(openmp());
}

void borrow_openmp(const OpenMp& borrowed) {
  openmp() = borrowed;
  team().borrow(borrowed);
}

void* Scratch::bytes(int64_t n) {
  if (n <= size_) return data_;
  std::free(data_);
  size_ = (n + n / 2 + (1 << 16)) & ~int64_t(4095);
  data_ = std::aligned_alloc(4096, size_);
  if (!data_) {
    size_ = 0;
    throw std::bad_alloc();
  }
#ifdef __linux__
  madvise(data_, size_, MADV_HUGEPAGE);
#endif
  return data_;
}

Scratch::~Scratch() { std::free(data_); }

}  // namespace pk
