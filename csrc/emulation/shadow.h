// Shadow memory: who touched each byte of shared memory, and in what order.
//
// A granule of 16 bytes is described by one cell until somebody touches a part of it; then it splits into words, and a word
// into bytes. A write of the whole merges it again, so tiles moved by 128-bit accesses cost one cell per 16 bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "clocks.h"
#include "emu.h"
#include "site.h"

namespace emu {

enum class Touch : uint8_t {
  read,
  write,
  atomic,
  engine_read,   // wgmma operands, TMA stores: the async proxy
  engine_write,  // a TMA load or cp.async at issue: the bytes are in flight until landed
  landing,       // cp.async data arriving at the issuing thread's wait
  mbarrier_init,
  mbarrier_use,
};

struct Access {
  Site where = 0;
  uint32_t clock = 0;
  int16_t who = -1;  // thread or engine
  bool atomic = false;
  bool generic = false;  // a plain store: invisible to the async proxy until fence.proxy.async
};

struct Cell {
  static constexpr int kInline = 2;
  Access write;
  Access readers[kInline];  // reads (and atomics) that no later read subsumes
  int32_t more = -1;        // index of an overflow list
  uint8_t count = 0;
  bool initialised = false;
  bool mbarrier = false;
  int16_t in_flight = -1;  // the thread whose asynchronous copy has not landed
};

// Who touches, and how its conflicts are judged.
struct Toucher {
  Touch touch;
  int thread;  // whose history decides what is ordered before
  int who;     // recorded as: the thread, or the engine that works for it
  uint32_t clock;
  Site where;
  bool check_initialised;
};

struct Conflict {
  FaultKind kind;
  const char* what = nullptr;  // null: none
  int other = -1;
  Site other_site = 0;
};

class Shadow {
 public:
  // Forgets everything; `bytes` is what may be touched.
  void reset(size_t bytes);
  size_t bytes() const { return bytes_; }
  // Judges and records an access to [offset, offset + n). Returns the first conflict met.
  Conflict access(Clocks& clocks, const std::vector<uint32_t>& proxy_fence, size_t offset, size_t n, const Toucher& by);
  void land(size_t offset, size_t n);   // clears the in-flight mark
  void retire_mbarrier(size_t offset);  // its bytes are plain memory again

 private:
  struct Node {
    Cell cell;
    int32_t children = -1;  // index of four nodes
  };
  struct Granule {
    Node node;
    uint32_t generation = 0;
  };
  struct Judge;

  Granule& granule(size_t index);
  void visit(Judge& judge, Node& node, size_t size, size_t low, size_t high);
  template <class F>
  void each_cell(Node& node, F f);
  template <class F>
  void each_cell(size_t offset, size_t n, F f);

  size_t bytes_ = 0;
  uint32_t generation_ = 0;
  std::vector<Granule> granules_;
  std::vector<Node> children_;
  std::vector<std::vector<Access>> overflow_;
  std::vector<int32_t> free_overflow_, free_children_;
};

}  // namespace emu
