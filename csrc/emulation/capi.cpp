// The session for callers outside C++: plain functions, the report as JSON.
#include <cstdio>
#include <string>

#include "emu.h"

namespace {

std::string quoted(const std::string& s) {
  std::string out = "\"";
  for (const char c : s) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

template <class T, class F>
std::string list(const T& items, F one) {
  std::string out = "[";
  for (const auto& item : items) out += (out.size() > 1 ? "," : "") + one(item);
  return out + "]";
}

std::string number(uint64_t n) { return std::to_string(n); }

std::string json(const emu::Fault& f) {
  return "{\"kind\":" + quoted(emu::name(f.kind)) + ",\"message\":" + quoted(f.message) + ",\"file\":" + quoted(f.where.file) +
         ",\"line\":" + std::to_string(f.where.line) + ",\"other_file\":" + quoted(f.other.file) +
         ",\"other_line\":" + std::to_string(f.other.line) + ",\"block\":[" + number(f.block[0]) + "," + number(f.block[1]) + "," +
         number(f.block[2]) + "],\"threads\":" + list(f.threads, [](int t) { return std::to_string(t); }) +
         ",\"count\":" + number(f.count) + "}";
}

std::string json(const emu::SiteProfile& s) {
  return "{\"file\":" + quoted(s.where.file) + ",\"line\":" + std::to_string(s.where.line) +
         ",\"space\":" + (s.shared ? "\"shared\"" : "\"global\"") + ",\"write\":" + (s.write ? "true" : "false") +
         ",\"bytes_per_thread\":" + std::to_string(s.bytes_per_thread) + ",\"requests\":" + number(s.requests) +
         ",\"cost\":" + number(s.cost) + ",\"ideal\":" + number(s.ideal) + "}";
}

std::string json(const emu::Counters& c) {
  std::string out = "{";
  const auto add = [&](const char* name, uint64_t n) { out += (out.size() > 1 ? "," : "") + quoted(name) + ":" + number(n); };
  add("launches", c.launches);
  add("blocks", c.blocks);
  add("switches", c.switches);
  add("barriers", c.barriers);
  add("shuffles", c.shuffles);
  add("ldmatrix", c.ldmatrix);
  add("stmatrix", c.stmatrix);
  add("mma", c.mma);
  add("wgmma", c.wgmma);
  add("async_copy_bytes", c.async_copy_bytes);
  add("tma_bytes", c.tma_bytes);
  add("matrix_bank_conflicts", c.matrix_bank_conflicts);
  add("shared_bank_conflicts", c.shared_bank_conflicts);
  add("global_sectors", c.global_sectors);
  add("global_sectors_ideal", c.global_sectors_ideal);
  return out + "}";
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void emu_configure(int schedule, uint64_t seed, int async, int workers, int races, int strict, int capability, int profile) {
  emu::config() = {static_cast<emu::Schedule>(schedule),
                   seed,
                   static_cast<emu::AsyncMode>(async),
                   workers,
                   races != 0,
                   strict != 0,
                   capability,
                   profile != 0};
}
void emu_clear_report() { emu::clear_report(); }
// Valid until the next call from the same thread.
const char* emu_report_json() {
  thread_local std::string text;
  const emu::Report r = emu::report();
  text = "{\"faults\":" + list(r.faults, [](const emu::Fault& f) { return json(f); }) + ",\"counters\":" + json(r.counters) +
         ",\"sites\":" + list(r.sites, [](const emu::SiteProfile& s) { return json(s); }) + "}";
  return text.c_str();
}
void* emu_allocate(size_t bytes, const char* label) { return emu::allocate(bytes, label); }
void emu_register(const void* base, size_t bytes, int writable, const char* label) {
  emu::register_range(base, bytes, writable != 0, label);
}
void emu_free_all() { emu::free_all(); }

}  // extern "C"
#pragma GCC visibility pop
