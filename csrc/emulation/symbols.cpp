// Return addresses to source lines, by addr2line: the toolchain that built the kernels is there wherever they run.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <map>

#include "recorder.h"

namespace emu {

// Frames inside the facade say nothing about the kernel; the caller's frame does.
static bool in_facade(const std::string& file) {
  return file.find("csrc/cuda/device/") != std::string::npos ||
         (file.find("csrc/emulation/") != std::string::npos && file.find("csrc/emulation/selftest/") == std::string::npos);
}

static std::string relative(const std::string& file) {
  const size_t at = file.find("csrc/");
  return at == std::string::npos ? file : file.substr(at);
}

static Location parse(const char* text) {
  const char* colon = std::strrchr(text, ':');
  if (!colon || text[0] == '?') return {};
  return {relative(std::string(text, static_cast<size_t>(colon - text))), std::atoi(colon + 1)};
}

static void locate_in(const char* module, uintptr_t base, const std::vector<Site>& sites, std::unordered_map<Site, Location>& out) {
  std::string command = "addr2line -a -i -e '" + std::string(module) + "'";
  char hex[32];
  for (const Site s : sites) {
    std::snprintf(hex, sizeof hex, " 0x%lx", static_cast<unsigned long>(s - base - 1));  // -1: inside the call
    command += hex;
  }
  FILE* pipe = popen((command + " 2>/dev/null").c_str(), "r");
  if (!pipe) return;
  char text[4096];
  size_t current = sites.size();
  size_t next = 0;
  while (std::fgets(text, sizeof text, pipe)) {
    if (text[0] == '0' && text[1] == 'x') {
      current = next++;
      continue;
    }
    if (current >= sites.size()) continue;
    const Location frame = parse(text);
    Location& found = out[sites[current]];
    if (found.line == 0 || (in_facade(found.file) && frame.line != 0)) found = frame;
  }
  pclose(pipe);
}

std::unordered_map<Site, Location> locate(const std::vector<Site>& sites) {
  std::unordered_map<Site, Location> out;
  std::map<std::pair<std::string, uintptr_t>, std::vector<Site>> by_module;
  for (const Site s : sites) {
    if (!out.emplace(s, Location{}).second || s == 0) continue;
    if (line_of(s) != 0) {
      out[s] = {relative(file_of(s)), line_of(s)};
      continue;
    }
    Dl_info info;
    if (dladdr(reinterpret_cast<void*>(s), &info) && info.dli_fname) {
      by_module[{info.dli_fname, reinterpret_cast<uintptr_t>(info.dli_fbase)}].push_back(s);
    }
  }
  for (const auto& [module, addresses] : by_module) {
    constexpr size_t kPerCall = 500;  // keeps the command line short
    for (size_t i = 0; i < addresses.size(); i += kPerCall) {
      const size_t end = i + kPerCall < addresses.size() ? i + kPerCall : addresses.size();
      locate_in(module.first.c_str(), module.second, {addresses.begin() + i, addresses.begin() + end}, out);
    }
  }
  return out;
}

}  // namespace emu
