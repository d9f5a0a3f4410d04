// Collects faults, counters and per-line profiles from all worker threads.
#pragma once
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "emu.h"
#include "site.h"

namespace emu {

struct RawFault {
  FaultKind kind;
  std::string message;
  Site where, other;
  unsigned block[3];
  std::vector<int> threads;
  uint64_t count;
};

struct ProfileKey {
  Site where;
  int shared_write_bytes;  // bytes << 2 | write << 1 | shared
  bool operator==(const ProfileKey& o) const { return where == o.where && shared_write_bytes == o.shared_write_bytes; }
};
struct ProfileHash {
  size_t operator()(const ProfileKey& k) const { return std::hash<uint64_t>()(k.where * 31 + k.shared_write_bytes); }
};
struct ProfileSum {
  uint64_t requests = 0, cost = 0, ideal = 0;
};
using ProfileTable = std::unordered_map<ProfileKey, ProfileSum, ProfileHash>;

class Recorder {
 public:
  static Recorder& instance();

  // True for the first fault of a kind at a place: only that one is worth formatting (a racy kernel makes millions).
  bool first(FaultKind kind, Site where);
  void record(RawFault fault);
  void add(const Counters& counters, const ProfileTable& sites);
  Report report();
  void clear();

 private:
  std::mutex mutex_;
  std::vector<RawFault> faults_;
  std::unordered_map<uint64_t, size_t> index_;
  Counters counters_{};
  ProfileTable sites_;
};

// Positions of the given sites: return addresses through addr2line, the innermost frame that is not the facade's.
std::unordered_map<Site, Location> locate(const std::vector<Site>& sites);

}  // namespace emu
