#include "clocks.h"

#include <cstdlib>
#include <cstring>

namespace emu {

static void join(uint32_t* into, const uint32_t* from, int n) {
  for (int i = 0; i < n; i++) into[i] = from[i] > into[i] ? from[i] : into[i];
}

void Clocks::forget() {
  drop(cached_view_);
  drop(cached_gathered_);
  drop(cached_result_);
  cached_view_ = cached_gathered_ = cached_result_ = nullptr;
}

Clocks::~Clocks() {
  forget();
  for (Snapshot* s : view_) drop(s);
  for (Snapshot* s : pool_) std::free(s);
}

void Clocks::reset(int threads) {
  forget();
  for (Snapshot* s : view_) drop(s);
  view_.clear();
  if (threads != threads_) {
    for (Snapshot* s : pool_) std::free(s);
    pool_.clear();
  }
  threads_ = threads;
  width_ = threads + kEngines;
  clock_.assign(width_, 1);
  for (int i = threads; i < width_; i++) clock_[i] = 0;
  Snapshot* nothing = fresh(nullptr);
  for (int i = 0; i < threads; i++) view_.push_back(share(nothing));
  drop(nothing);
}

Snapshot* Clocks::fresh(const Snapshot* copy) {
  Snapshot* s;
  if (pool_.empty()) {
    s = static_cast<Snapshot*>(std::malloc(sizeof(Snapshot) + sizeof(uint32_t) * width_));
  } else {
    s = pool_.back();
    pool_.pop_back();
  }
  s->references = 1;
  if (copy)
    std::memcpy(s->seen, copy->seen, sizeof(uint32_t) * width_);
  else
    std::memset(s->seen, 0, sizeof(uint32_t) * width_);
  return s;
}

void Clocks::drop(Snapshot* s) {
  if (s && --s->references == 0) pool_.push_back(s);
}

void Clocks::assign(int thread, Snapshot* s) {
  share(s);
  drop(view_[thread]);
  view_[thread] = s;
}

void Clocks::release(int thread, Gathering& into) {
  if (!into.sum) into.sum = fresh(nullptr);
  if (view_[thread] != into.last) {
    join(into.sum->seen, view_[thread]->seen, width_);
    drop(into.last);
    into.last = share(view_[thread]);
  }
  into.sum->seen[thread] = clock_[thread]++;
}

void Clocks::merge(const Snapshot* history, Gathering& into) {
  if (!into.sum) into.sum = fresh(nullptr);
  join(into.sum->seen, history->seen, width_);
}

void Clocks::add(int engine, uint32_t clock, Gathering& into) {
  if (!into.sum) into.sum = fresh(nullptr);
  if (into.sum->seen[engine] < clock) into.sum->seen[engine] = clock;
}

void Clocks::adopt(int thread, const Gathering& gathered) { assign(thread, gathered.sum); }

void Clocks::acquire(int thread, Snapshot* gathered) {
  if (!gathered || view_[thread] == gathered) return;
  if (view_[thread] != cached_view_ || gathered != cached_gathered_) {
    Snapshot* result = fresh(view_[thread]);
    join(result->seen, gathered->seen, width_);
    forget();
    cached_view_ = share(view_[thread]);
    cached_gathered_ = share(gathered);
    cached_result_ = result;
  }
  assign(thread, cached_result_);
}

void Clocks::acquire(int thread, int engine, uint32_t clock) {
  if (view_[thread]->seen[engine] >= clock) return;
  Snapshot* one = fresh(nullptr);
  one->seen[engine] = clock;
  acquire(thread, one);
  drop(one);
}

void Clocks::clear(Gathering& gathering) {
  drop(gathering.sum);
  drop(gathering.last);
  gathering = Gathering();
}

}  // namespace emu
