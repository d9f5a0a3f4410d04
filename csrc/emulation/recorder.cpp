#include "recorder.h"

#include <algorithm>

namespace emu {

const char* name(FaultKind kind) {
  static const char* const names[] = {"race",
                                      "async_in_flight",
                                      "uninitialised_shared",
                                      "shared_out_of_bounds",
                                      "global_out_of_bounds",
                                      "read_only_write",
                                      "misaligned",
                                      "barrier_divergence",
                                      "barrier_exited",
                                      "deadlock",
                                      "livelock",
                                      "warp_divergence",
                                      "exited_lane",
                                      "lane_outside_mask",
                                      "mbarrier",
                                      "wgmma",
                                      "tensor_map",
                                      "proxy_fence",
                                      "unawaited_copy",
                                      "invalid_launch"};
  static_assert(sizeof names / sizeof *names == static_cast<int>(FaultKind::invalid_launch) + 1);
  return names[static_cast<int>(kind)];
}

Recorder& Recorder::instance() {
  static Recorder recorder;
  return recorder;
}

static uint64_t key(FaultKind kind, Site where) { return where * 64 + static_cast<uint64_t>(kind); }

bool Recorder::first(FaultKind kind, Site where) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = index_.find(key(kind, where));
  if (found == index_.end()) return true;
  faults_[found->second].count++;
  return false;
}

void Recorder::record(RawFault fault) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto [position, inserted] = index_.emplace(key(fault.kind, fault.where), faults_.size());
  if (inserted)
    faults_.push_back(std::move(fault));
  else
    faults_[position->second].count++;
}

void Recorder::add(const Counters& counters, const ProfileTable& sites) {
  static_assert(sizeof(Counters) % sizeof(uint64_t) == 0);
  std::lock_guard<std::mutex> lock(mutex_);
  auto* sum = reinterpret_cast<uint64_t*>(&counters_);
  const auto* part = reinterpret_cast<const uint64_t*>(&counters);
  for (size_t i = 0; i < sizeof(Counters) / sizeof(uint64_t); i++) sum[i] += part[i];
  for (const auto& [where, cost] : sites) {
    ProfileSum& total = sites_[where];
    total.requests += cost.requests;
    total.cost += cost.cost;
    total.ideal += cost.ideal;
  }
}

Report Recorder::report() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Site> sites;
  for (const RawFault& fault : faults_) sites.insert(sites.end(), {fault.where, fault.other});
  for (const auto& entry : sites_) sites.push_back(entry.first.where);
  const auto where = locate(sites);
  Report out;
  out.counters = counters_;
  for (const RawFault& f : faults_) {
    Fault fault{f.kind, f.message, where.at(f.where), where.at(f.other), {f.block[0], f.block[1], f.block[2]}, f.threads, f.count};
    out.faults.push_back(std::move(fault));
  }
  for (const auto& [at, sum] : sites_) {
    const int packed = at.shared_write_bytes;
    out.sites.push_back({where.at(at.where), (packed & 1) != 0, (packed & 2) != 0, packed >> 2, sum.requests, sum.cost, sum.ideal});
  }
  std::sort(out.sites.begin(), out.sites.end(),
            [](const SiteProfile& a, const SiteProfile& b) { return a.cost - a.ideal > b.cost - b.ideal; });
  return out;
}

void Recorder::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  faults_.clear();
  index_.clear();
  sites_.clear();
  counters_ = Counters{};
}

Report report() { return Recorder::instance().report(); }
void clear_report() { Recorder::instance().clear(); }

Config& config() {
  static Config session;
  return session;
}

}  // namespace emu
