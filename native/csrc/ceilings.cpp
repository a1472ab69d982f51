#include "ceilings.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>

#include "pool.h"
#include "program.h"

namespace mainspring {
namespace {

constexpr int64_t kModelBytes = 96'000'000, kMemoryBytes = 256 << 20;
constexpr int64_t kPieceBytes = 1 << 20;  // of memory, claimed at a time
constexpr int64_t kCachedBytes = 8192;    // of it and of the rows: within any first-level cache

// One exercise, in pieces that threads claim.
class Workout : public Pass {
 public:
  Workout(const Kernels& kernels, Exercise kind, const uint8_t* memory, int64_t piece_bytes, int num_pieces,
          int num_repeats, int num_threads)
      : kernels_(kernels),
        kind_(kind),
        memory_(memory),
        piece_bytes_(piece_bytes),
        num_pieces_(num_pieces),
        num_repeats_(num_repeats),
        done_(num_threads) {}

  int num_steps() const override { return 1; }
  int num_units(int) const override { return num_pieces_; }
  void run(int, int unit, int thread) override {
    const uint8_t* piece = memory_ + (kind_ == Exercise::Reads ? unit * piece_bytes_ : 0);
    Done& done = done_[thread];
    for (int i = 0; i < num_repeats_; ++i)
      done.amount += kernels_.exercise(kind_, piece, piece_bytes_, &done.result);
  }

  // Operations, or bytes, per second: of `num_windows` runs the fastest.
  double rate(Pool& pool, int num_windows) {
    double best = 0;
    for (int window = 0; window < num_windows; ++window) {
      for (Done& done : done_) done.amount = 0;
      const auto start = std::chrono::steady_clock::now();
      pool.run(*this);
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      double amount = 0;
      for (const Done& done : done_) amount += static_cast<double>(done.amount);
      best = std::max(best, amount / taken.count());
    }
    return best;
  }

 private:
  struct alignas(64) Done {
    int64_t amount = 0;
    int32_t result = 0;
  };

  const Kernels& kernels_;
  Exercise kind_;
  const uint8_t* memory_;
  int64_t piece_bytes_;
  int num_pieces_, num_repeats_;
  std::vector<Done> done_;
};

}  // namespace

std::vector<Ceilings> measure_ceilings(const Kernels& kernels, int num_threads) {
  const Memory memory(kMemoryBytes);
  std::memset(memory.data(), 1, kMemoryBytes);  // pages that were never written are all the same one
  std::vector<Ceilings> found;
  for (int threads = 1; threads <= num_threads; ++threads) {
    Pool pool(threads);
    const auto rate = [&](Exercise kind, int64_t piece_bytes, int num_pieces, int num_repeats,
                          int num_windows) {
      return Workout(kernels, kind, memory.data(), piece_bytes, num_pieces, num_repeats, threads)
          .rate(pool, num_windows);
    };
    Ceilings c{};
    c.num_threads = threads;
    // Windows of about half a millisecond: short enough for one to be free of neighbours.
    c.byte_products = rate(Exercise::ByteProducts, kCachedBytes, 4 * threads, 100, 20);
    c.float_products = rate(Exercise::FloatProducts, kCachedBytes, 4 * threads, 25, 20);
    c.model_reads = rate(Exercise::Reads, kPieceBytes, kModelBytes / kPieceBytes, 1, 8);
    c.memory_reads = rate(Exercise::Reads, kPieceBytes, kMemoryBytes / kPieceBytes, 1, 3);
    found.push_back(c);
  }
  return found;
}

}  // namespace mainspring
