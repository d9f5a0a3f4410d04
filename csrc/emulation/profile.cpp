#include "profile.h"

#include <algorithm>

namespace emu {

Wavefronts shared_wavefronts(const uint64_t* offset, unsigned lanes, int bytes) {
  const int per_wavefront = bytes <= 4 ? 32 : 128 / bytes;  // lanes that 128 bytes serve
  Wavefronts out{0, 0};
  for (int first = 0; first < 32; first += per_wavefront) {
    std::vector<uint64_t> words;
    for (int lane = first; lane < first + per_wavefront; lane++) {
      if (!(lanes >> lane & 1)) continue;
      for (int b = 0; b < bytes; b += 4) words.push_back((offset[lane] + b) / 4);
    }
    if (words.empty()) continue;
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    int bank[32] = {};
    for (const uint64_t w : words) bank[w % 32]++;
    out.cost += *std::max_element(bank, bank + 32);
    out.ideal += 1;
  }
  return out;
}

static int sectors(const uint64_t* address, unsigned lanes, int bytes, int* ideal) {
  std::vector<uint64_t> touched;
  uint64_t total = 0;
  for (int lane = 0; lane < 32; lane++) {
    if (!(lanes >> lane & 1)) continue;
    for (uint64_t s = address[lane] / 32; s <= (address[lane] + bytes - 1) / 32; s++) touched.push_back(s);
    bool repeated = false;
    for (int before = 0; before < lane; before++) repeated |= (lanes >> before & 1) && address[before] == address[lane];
    if (!repeated) total += bytes;
  }
  std::sort(touched.begin(), touched.end());
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  *ideal = static_cast<int>((total + 31) / 32);
  return static_cast<int>(touched.size());
}

void Profile::reset(int warps) {
  warps_.assign(warps, Streams());
  table.clear();
  shared_extra_ = sectors_ = sectors_ideal_ = 0;
}

void Profile::account(const ProfileKey& key, const Request& request) {
  const int bytes = key.shared_write_bytes >> 2;
  ProfileSum& sum = table[key];
  sum.requests++;
  if (key.shared_write_bytes & 1) {
    const Wavefronts w = shared_wavefronts(request.address, request.lanes, bytes);
    sum.cost += w.cost;
    sum.ideal += w.ideal;
    shared_extra_ += w.cost - w.ideal;
  } else {
    int ideal;
    const int cost = sectors(request.address, request.lanes, bytes, &ideal);
    sum.cost += cost;
    sum.ideal += ideal;
    sectors_ += cost;
    sectors_ideal_ += ideal;
  }
}

void Profile::record(int warp, int lane, unsigned alive, bool shared, bool write, uint64_t address, int bytes, Site where) {
  const ProfileKey key{where, bytes << 2 | (write ? 2 : 0) | (shared ? 1 : 0)};
  Stream& stream = warps_[warp][key];
  const uint32_t index = stream.passed[lane]++;
  if (index < stream.finished) return;  // cannot be paired any more
  while (stream.open.size() <= index - stream.finished) stream.open.emplace_back();
  Request& request = stream.open[index - stream.finished];
  request.lanes |= 1u << lane;
  request.address[lane] = address;
  while (!stream.open.empty() && (stream.open.front().lanes & alive) == alive) {
    account(key, stream.open.front());
    stream.open.pop_front();
    stream.finished++;
  }
}

void Profile::finish(Counters& counters) {
  for (Streams& streams : warps_) {
    for (auto& [key, stream] : streams) {
      for (const Request& request : stream.open) {
        if (request.lanes) account(key, request);
      }
    }
  }
  warps_.clear();
  counters.shared_bank_conflicts += shared_extra_;
  counters.global_sectors += sectors_;
  counters.global_sectors_ideal += sectors_ideal_;
}

}  // namespace emu
