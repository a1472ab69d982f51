// The threads, and how they share a pass.
//
// Theory of operation.
// - A pass is a list of steps, and a step a number of units. Threads claim units one by one; all of a step's units
//   are finished before a unit of the next begins. Nobody waits for a *thread*: one that the system has taken off
//   its processor while it holds no unit costs nothing, and while it holds one costs that unit.
// - A claim is a compare-and-swap on (pass number, units left), one word: what tells that there is a unit tells whose it
//   is. A thread that sleeps through the end of a pass finds no unit of it, or another number, and goes back to
//   waiting; so passes need no meeting of all threads at their ends, and the next one may begin beside it.
// - Where neighbouring units are better done by one thread, a claim is of a run of them: a part of what is left, so
//   that runs become shorter and all threads end at about the same time.
// - Waiting for work is bounded spinning, then sleep in the kernel. Waiting for other threads' last units is bounded
//   spinning, then yielding.
// - Threads are not pinned one to a processor: they keep the process's own mask, so that beside a busy neighbour the
//   system may move them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace mainspring {

class Pass {
 public:
  virtual ~Pass() = default;
  virtual int num_steps() const = 0;
  virtual int num_units(int step) const = 0;
  virtual bool in_runs(int /*step*/) const { return false; }
  virtual void run(int step, int unit, int thread) = 0;  // must not throw
};

class Pool {
 public:
  // The caller's thread is one of them. Throws std::system_error where the system gives no more threads.
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return 1 + static_cast<int>(threads_.size()); }
  // Returns when every unit is finished. One pass at a time; calls from several threads take turns.
  void run(Pass& pass);

 private:
  static constexpr int kMaxSteps = 4096;
  struct alignas(64) Step {
    std::atomic<uint64_t> claim;          // pass number << 32 | units left
    std::atomic<uint32_t> num_units;      // of the claim's pass, for whoever has a unit of it
    std::atomic<uint32_t> parts;          // likewise: a claim takes one of so many of what is left; 0: one unit
    std::atomic<uint32_t> num_finished;
  };

  void close();
  void wait_for_work(int thread);
  void work(Pass& pass, uint32_t number, int thread);

  std::unique_ptr<Step[]> steps_;
  std::atomic<int> num_steps_{0};
  std::atomic<Pass*> pass_{nullptr};
  std::atomic<uint32_t> number_{0};
  std::atomic<bool> closing_{false};
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  std::vector<std::thread> threads_;
};

}  // namespace mainspring
