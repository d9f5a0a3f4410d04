// One persistent team of threads, ours alone; or, where another library's pool keeps the same cores busy, the threads of that pool.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace pk {

// [0, n) shared out among threads: each takes a few at a time from the front of a range of its own, then from the back of
// whoever has most left, so that a thread which was interrupted keeps nobody waiting.
class Shares {
 public:
  explicit Shares(int threads) : ranges_(size_t(threads)) {}
  // Gives thread tid its range. Before a barrier that comes before anybody takes.
  void reset(int tid, int64_t n) {
    const auto threads = int64_t(ranges_.size());
    ranges_[size_t(tid)].span.store({uint32_t(n * tid / threads), uint32_t(n * (tid + 1) / threads)}, std::memory_order_relaxed);
  }
  // body(begin, end), until nothing is left.
  template <class Body>
  void take(int tid, int64_t grain, Body&& body) {
    for (Span s; (s = from_front(ranges_[size_t(tid)].span, uint32_t(grain))).size();) body(int64_t(s.begin), int64_t(s.end));
    for (Span s; (s = from_fullest(uint32_t(grain))).size();) body(int64_t(s.begin), int64_t(s.end));
  }

 private:
  struct Span {
    uint32_t begin = 0, end = 0;
    uint32_t size() const { return end - begin; }
  };
  struct alignas(128) Range {
    std::atomic<Span> span{Span{}};
  };
  static Span from_front(std::atomic<Span>& range, uint32_t grain);
  Span from_fullest(uint32_t grain);
  std::vector<Range> ranges_;
};

// The pool of an OpenMP runtime, by the functions that compiled code calls.
struct OpenMp {
  void (*parallel)(void (*body)(void*), void*, unsigned threads, unsigned flags) = nullptr;  // GOMP_parallel
  int (*threads)() = nullptr;                                                                // omp_get_num_threads
  int (*thread)() = nullptr;                                                                 // omp_get_thread_num
};

class Team {
 public:
  explicit Team(int size);
  ~Team();
  int size() const { return size_; }

  // Calls body(tid) once for every tid and returns when all are done. Who has not begun when the caller is done with its own part
  // (its CPU may be busy in another library's pool) loses it to the caller; a body that calls barrier() needs all threads
  // `together`. One caller at a time; not re-entrant. The body must not throw: validate before. `shared`: what shares() starts with.
  enum class Start { apart, together };
  template <class Body>
  void run(Body&& body, Start start = Start::apart, int64_t shared = 0) {
    using Plain = std::remove_reference_t<Body>;
    run_erased([](void* b, int tid) { (*static_cast<Plain*>(b))(tid); }, const_cast<void*>(static_cast<const void*>(&body)), start, shared);
  }
  // Splits [0, n) into one contiguous range per thread: body(begin, end, tid). Runs inline when n is below `grain`.
  template <class Body>
  void parallel_for(int64_t n, int64_t grain, Body&& body) {
    if (n <= grain || size_ == 1) {
      if (n > 0) inline_run([&] { body(int64_t(0), n, 0); });
      return;
    }
    run([&](int tid) {
      const int64_t begin = n * tid / size_, end = n * (tid + 1) / size_;
      if (begin < end) body(begin, end, tid);
    });
  }
  // Inside a run that started together: every thread waits for all others.
  void barrier();
  // Inside run().
  Shares& shares() { return shares_; }
  // From now on the parts of a run are done by the threads of `openmp`; by ours again when it has no functions.
  void borrow(const OpenMp& openmp);

 private:
  using Erased = void (*)(void*, int);
  // A part of run `number` that nobody has begun, or 0.
  struct alignas(128) Part {
    std::atomic<uint32_t> number{0};
  };
  static constexpr uint32_t kBorrowed = ~0u;  // the number of every run of a borrowed pool
  void run_erased(Erased fn, void* body, Start start, int64_t shared);
  void run_ours(Start start);
  bool run_borrowed(Start start);
  bool claim(int tid, uint32_t number) { return parts_[size_t(tid)].number.compare_exchange_strong(number, 0); }
  void finish_part();
  template <class F>
  void inline_run(F&& f) {
    const uint32_t saved = flush_denormals();
    f();
    restore_denormals(saved);
  }
  void worker(int tid);
  static uint32_t flush_denormals();  // they cost up to 3x in scales and softmax tails
  static void restore_denormals(uint32_t saved);

  int size_;
  Shares shares_;
  std::vector<Part> parts_;
  alignas(128) std::atomic<uint32_t> run_{0};   // the number of the latest run
  alignas(128) std::atomic<uint32_t> left_{0};  // its parts that are not done
  alignas(128) std::atomic<uint32_t> arrived_{0};
  alignas(128) std::atomic<uint32_t> epoch_{0};
  std::atomic<int32_t> parked_{0};
  std::atomic<bool> stop_{false};
  Erased fn_ = nullptr;
  void* body_ = nullptr;
  OpenMp openmp_;
  std::mutex caller_;
  std::vector<std::thread> threads_;
};

// The team that every op uses. Sized from the affinity mask and the cgroup quota unless set.
Team& team();
int default_threads();
void set_num_threads(int n);
void borrow_openmp(const OpenMp& openmp);  // for team(), and for those that set_num_threads makes later

// Memory that lives across calls, so that no op allocates in the token loop. Slot ids are per call site and per thread.
class Scratch {
 public:
  template <class T>
  T* get(int64_t count) {
    return static_cast<T*>(bytes(count * int64_t(sizeof(T))));
  }
  void* bytes(int64_t n);
  ~Scratch();

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace pk
