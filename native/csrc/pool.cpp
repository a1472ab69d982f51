#include "pool.h"

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <stdexcept>

namespace mainspring {
namespace {

constexpr int kSpins = 2000;  // pauses, some 50 us: about what waking a sleeping thread costs

}  // namespace

Pool::Pool(int num_threads) : steps_(new Step[kMaxSteps]) {
  for (int i = 0; i < kMaxSteps; ++i) {
    steps_[i].claim = 0;
    steps_[i].num_units = 0;
    steps_[i].parts = 0;
    steps_[i].num_finished = 0;
  }
  try {
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { wait_for_work(i); });
  } catch (...) {
    close();
    throw;
  }
}

Pool::~Pool() { close(); }

void Pool::close() {
  closing_ = true;
  ++number_;
  number_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Pool::run(Pass& pass) {
  const int num_steps = pass.num_steps();
  if (num_steps > kMaxSteps) throw std::length_error("a pass of more than 4096 steps");
  while (busy_.test_and_set(std::memory_order_acquire)) busy_.wait(true);
  const uint32_t number = number_.load() + 1;
  for (int s = 0; s < num_steps; ++s) {
    const auto num_units = static_cast<uint32_t>(pass.num_units(s));
    steps_[s].num_units.store(num_units, std::memory_order_relaxed);
    steps_[s].parts.store(pass.in_runs(s) ? 2 * num_threads() : 0, std::memory_order_relaxed);
    steps_[s].num_finished.store(0, std::memory_order_relaxed);
    steps_[s].claim.store(static_cast<uint64_t>(number) << 32 | num_units, std::memory_order_release);
  }
  num_steps_ = num_steps;
  pass_ = &pass;
  number_ = number;
  number_.notify_all();
  work(pass, number, 0);
  busy_.clear(std::memory_order_release);
  busy_.notify_one();
}

void Pool::wait_for_work(int thread) {
  uint32_t seen = 0;
  while (true) {
    for (int spin = 0; spin < kSpins && number_.load(std::memory_order_relaxed) == seen; ++spin) _mm_pause();
    number_.wait(seen);
    seen = number_.load();
    if (closing_) return;
    work(*pass_.load(), seen, thread);
  }
}

void Pool::work(Pass& pass, uint32_t number, int thread) {
  for (int s = 0, end = num_steps_; s < end; ++s) {
    Step& step = steps_[s];
    uint64_t claim = step.claim.load(std::memory_order_acquire);
    while (true) {
      if (claim >> 32 != number) return;  // this pass is over
      const auto left = static_cast<uint32_t>(claim);
      if (left == 0) break;
      const uint32_t parts = step.parts.load(std::memory_order_relaxed);
      const uint32_t count = parts ? std::max(1u, left / parts) : 1;
      if (step.claim.compare_exchange_weak(claim, claim - count, std::memory_order_acq_rel)) {
        const uint32_t first = step.num_units.load(std::memory_order_relaxed) - left;
        for (uint32_t unit = first; unit < first + count; ++unit) pass.run(s, static_cast<int>(unit), thread);
        step.num_finished.fetch_add(count, std::memory_order_release);
        claim = step.claim.load(std::memory_order_acquire);
      }
    }
    for (int spin = 0; step.num_finished.load(std::memory_order_acquire) < step.num_units.load(); ++spin) {
      if (step.claim.load(std::memory_order_relaxed) >> 32 != number) return;
      if (spin < kSpins) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }
}

}  // namespace mainspring
