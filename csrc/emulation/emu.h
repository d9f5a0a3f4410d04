// Runs CUDA kernels on the CPU: what host code sees.
//
// A kernel compiled by g++ is an ordinary function. `emu::launch` runs it once per thread of every block, the threads of a
// block as fibers on one CPU thread, and records whatever the hardware would have left undefined: races, reads of shared
// memory that nobody wrote, accesses outside a buffer, barriers that cannot complete. docs: csrc/emulation/README.md.
#pragma once
#include <driver_types.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#pragma GCC visibility push(default)
namespace emu {

enum class Schedule : int { forward = 0, reverse = 1, random = 2 };

// When an asynchronous copy becomes visible. poison: garbage from issue to wait, then the data (finds every early read);
// lazy: the old bytes until the wait; eager: the data at once.
enum class AsyncMode : int { lazy = 0, eager = 1, poison = 2 };

struct Config {
  Schedule schedule = Schedule::forward;
  uint64_t seed = 1;  // orders fibers, blocks and copy landings under Schedule::random
  AsyncMode async = AsyncMode::poison;
  int workers = 1;       // CPU threads that run blocks; 0 = one per core
  bool races = true;     // keep shadow memory for shared memory
  bool strict = true;    // also report what the hardware tolerates: barriers joined by exited threads, unawaited copies
  int capability = 90;   // what launchers are told that the device is; kernels of any kind run
  bool profile = false;  // count bank conflicts and sectors of plain loads and stores, per source line
};

enum class FaultKind : int {
  race,
  async_in_flight,
  uninitialised_shared,
  shared_out_of_bounds,
  global_out_of_bounds,
  read_only_write,
  misaligned,
  barrier_divergence,
  barrier_exited,
  deadlock,
  livelock,
  warp_divergence,
  exited_lane,
  lane_outside_mask,
  mbarrier,
  wgmma,
  tensor_map,
  proxy_fence,
  unawaited_copy,
  invalid_launch,
};
const char* name(FaultKind kind);

struct Location {
  std::string file;
  int line = 0;
};

struct Fault {
  FaultKind kind;
  std::string message;
  Location where;  // the access or call that is reported
  Location other;  // what it conflicts with, if anything
  unsigned block[3];
  std::vector<int> threads;  // linear thread indices, the reporter first
  uint64_t count = 1;        // how often the same kind was met at the same place
};

struct Counters {
  uint64_t launches, blocks, switches, barriers, shuffles;
  uint64_t ldmatrix, stmatrix, mma, wgmma;
  uint64_t async_copy_bytes, tma_bytes;
  uint64_t matrix_bank_conflicts;                 // extra wavefronts of ldmatrix and stmatrix
  uint64_t shared_bank_conflicts;                 // extra wavefronts of plain accesses and cp.async (profile only)
  uint64_t global_sectors, global_sectors_ideal;  // 32-byte sectors touched, and how many the bytes would need (profile only)
};

struct SiteProfile {
  Location where;
  bool shared;  // shared: wavefronts; global: 32-byte sectors
  bool write;
  int bytes_per_thread;
  uint64_t requests, cost, ideal;
};

struct Report {
  std::vector<Fault> faults;
  Counters counters{};
  std::vector<SiteProfile> sites;
};

// The session: one configuration and one growing report per process. Not to be changed while a launch runs.
Config& config();
Report report();  // symbolised copy of what was recorded since clear_report()
void clear_report();

// Device memory. Kernels may touch registered ranges only (and their own stack, shared memory, parameters, constants).
void* allocate(size_t bytes, const char* label);  // in an arena, 64 KiB apart, filled with 0xff
void free_all();                                  // every allocation and registration
void register_range(const void* base, size_t bytes, bool writable, const char* label);

struct LaunchSpec {
  dim3 grid, block;
  size_t shared_bytes;
  void (*entry)(const void* closure);
  const void* closure;
  size_t closure_bytes;
  const void* kernel;
  bool instrumented;  // the kernel was compiled with the memory hooks
};
cudaError_t launch(const LaunchSpec& spec);

namespace detail {
template <class... P>
struct Closure {
  void (*kernel)(P...);
  std::tuple<P...> arguments;
  static void enter(const void* self) {
    const auto* closure = static_cast<const Closure*>(self);
    std::apply(closure->kernel, closure->arguments);
  }
};
}  // namespace detail

#ifdef __SANITIZE_THREAD__
inline constexpr bool kInstrumented = true;
#else
inline constexpr bool kInstrumented = false;
#endif

// Runs `kernel` to completion under the session's configuration. cudaErrorLaunchFailure if a block could not finish.
template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, A&&... arguments) {
  static_assert(sizeof...(P) == sizeof...(A), "a kernel is launched with exactly its parameters");
  using Closure = detail::Closure<P...>;
  const Closure closure{kernel, std::tuple<P...>(static_cast<P>(arguments)...)};
  return launch(LaunchSpec{grid, block, shared_bytes, &Closure::enter, &closure, sizeof closure, reinterpret_cast<const void*>(kernel),
                           kInstrumented});
}

// The same under a configuration of its own, with a report of its own.
template <class... P, class... A>
Report run(const Config& with, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, A&&... arguments) {
  const Config before = config();
  clear_report();
  config() = with;
  launch(kernel, grid, block, shared_bytes, static_cast<A&&>(arguments)...);
  config() = before;
  return report();
}

}  // namespace emu
#pragma GCC visibility pop
