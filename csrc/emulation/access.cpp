// Every access to shared memory ends here: bounds, alignment, shadow, profile.
#include <dlfcn.h>
#include <link.h>

#include <unordered_map>

#include "block.h"

namespace emu {

void Block::conflict(const Conflict& c, const char* space, size_t offset, size_t n, Site where, int thread) {
  if (!c.what) return;
  const int other = c.other >= threads ? -1 : c.other;
  if (c.other < 0) {
    fault(c.kind, where, c.other_site, -1, "%s: %zu bytes at %s offset %zu, thread %d", c.what, n, space, offset, thread);
  } else if (other < 0) {
    fault(c.kind, where, c.other_site, -1, "%s: %zu bytes at %s offset %zu, thread %d against an asynchronous engine", c.what, n, space,
          offset, thread);
  } else {
    fault(c.kind, where, c.other_site, other, "%s: %zu bytes at %s offset %zu, thread %d (warp %d) against thread %d (warp %d)", c.what, n,
          space, offset, thread, thread / 32, other, other / 32);
  }
}

bool Block::check_shared(uint32_t offset, size_t n, size_t alignment, const char* what, Site where) {
  if (offset % alignment != 0) {
    fault(FaultKind::misaligned, where, 0, -1, "%s: shared offset %u is not a multiple of %zu", what, offset, alignment);
    return false;
  }
  if (offset + n > shared_bytes) {
    fault(FaultKind::shared_out_of_bounds, where, 0, -1, "%s: %zu bytes at shared offset %u of %zu", what, n, offset, shared_bytes);
    return false;
  }
  return true;
}

void Block::touch_as(const Toucher& by, uint32_t offset, size_t n) {
  if (!settings.races) return;
  conflict(shadow.access(clocks, proxy_fenced, offset, n, by), "shared", offset, n, by.where, by.thread);
}

void Block::touch(Touch touch, uint32_t offset, size_t n, Site where) {
  const int me = emu::fiber()->thread;
  touch_as({touch, me, me, clocks.now(me), where, spec->instrumented}, offset, n);
}

void Block::touch_static(Touch touch, size_t offset, size_t n, Site where) {
  if (!settings.races) return;
  const int me = emu::fiber()->thread;
  const Toucher by{touch, me, me, clocks.now(me), where, spec->instrumented};
  conflict(static_shadow.access(clocks, proxy_fenced, offset, n, by), "static shared", offset, n, where, me);
}

uint32_t shared_address(const void* p, Site where) {
  Block& b = *block();
  const auto* c = static_cast<const unsigned char*>(p);
  if (c < b.shared || c > b.shared + b.shared_bytes) {
    b.fault(FaultKind::shared_out_of_bounds, where, 0, -1, "the shared address of a pointer outside dynamic shared memory");
    return 0;
  }
  return static_cast<uint32_t>(c - b.shared);
}

namespace {

struct TlsIndex {
  unsigned long module, offset;
};
extern "C" void* __tls_get_addr(TlsIndex*);

struct Search {
  uintptr_t address;
  Module found;
};

int visit(dl_phdr_info* info, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  uintptr_t low = UINTPTR_MAX, high = 0;
  bool inside = false;
  size_t tls = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type == PT_TLS) tls = segment.p_memsz;
    if (segment.p_type != PT_LOAD) continue;
    const uintptr_t begin = info->dlpi_addr + segment.p_vaddr, end = begin + segment.p_memsz;
    low = begin < low ? begin : low;
    high = end > high ? end : high;
    inside |= search.address >= begin && search.address < end;
  }
  if (!inside) return 0;
  search.found = {nullptr, tls, reinterpret_cast<const unsigned char*>(low), reinterpret_cast<const unsigned char*>(high)};
  if (tls != 0) {
    TlsIndex index{info->dlpi_tls_modid, 0};
    search.found.thread_local_base = static_cast<unsigned char*>(__tls_get_addr(&index));
  }
  return 1;
}

}  // namespace

Module module_of(const void* kernel) {
  thread_local std::unordered_map<const void*, Module> known;  // the thread-local block differs per CPU thread
  const auto [entry, inserted] = known.try_emplace(kernel);
  if (inserted) {
    Search search{reinterpret_cast<uintptr_t>(kernel), {}};
    dl_iterate_phdr(visit, &search);
    entry->second = search.found;
  }
  return entry->second;
}

}  // namespace emu
