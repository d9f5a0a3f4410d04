// Bank conflicts and sectors of plain loads and stores, by source line.
//
// Fibers run one lane at a time, so a warp's instruction is put together again from its lanes: the n-th time that each lane
// passes the same place. Lanes that skip an access (a predicate) shift the pairing; the counts are exact for converged code.
#pragma once
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "recorder.h"
#include "site.h"

namespace emu {

// Wavefronts that `bytes`-wide accesses at these byte offsets of shared memory take, and how few they could.
struct Wavefronts {
  int cost, ideal;
};
Wavefronts shared_wavefronts(const uint64_t* offset, unsigned lanes, int bytes);

class Profile {
 public:
  void reset(int warps);
  void record(int warp, int lane, unsigned alive, bool shared, bool write, uint64_t address, int bytes, Site where);
  void finish(Counters& counters);
  ProfileTable table;

 private:
  struct Request {
    unsigned lanes = 0;
    uint64_t address[32];
  };
  struct Stream {
    uint32_t passed[32] = {};
    uint32_t finished = 0;
    std::deque<Request> open;
  };
  using Streams = std::unordered_map<ProfileKey, Stream, ProfileHash>;
  void account(const ProfileKey& key, const Request& request);

  std::vector<Streams> warps_;
  uint64_t shared_extra_ = 0, sectors_ = 0, sectors_ideal_ = 0;
};

}  // namespace emu
