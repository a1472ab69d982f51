#include "cpu.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <string>

namespace mainspring {

const std::vector<const Kernels*>& all_variants() {
  static const std::vector<const Kernels*> variants{&kernels_avx2, &kernels_avx512};
  return variants;
}

bool can_run(const Kernels& variant) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  if (&variant == &kernels_avx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

const Kernels* find_variant(const std::string& name) {
  for (const Kernels* variant : all_variants())
    if (name == variant->name) return variant;
  return nullptr;
}

double measure(const Kernels& variant) {
  // 12 rows by 64 outputs of 512 inputs: all of it stays in the first-level cache, or nearly.
  constexpr int kRows = 12, kPanels = 4, kColumns = 512, kBlocks = kColumns / kBlock, kRounds = 16, kWindows = 12;
  alignas(64) static uint8_t codes[kPanels * kLanes * kColumns / 2];
  alignas(64) static uint16_t scales[kPanels * kLanes * kBlocks];
  alignas(64) int8_t high[kRows * kColumns] = {};
  float row_scales[kRows * kBlocks] = {};
  int32_t sums[kRows * kColumns / kGroup] = {};
  alignas(64) float tile[kRows * kPanels * kLanes];
  const Matrix matrix{Form::Q4, kPanels * kLanes, kColumns, 8, codes, scales, nullptr, kLanes * kColumns / 2};
  const Input input{nullptr, {high, nullptr, row_scales, sums, kColumns}};
  double best_ns = std::numeric_limits<double>::infinity();
  for (int window = 0; window < kWindows; ++window) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kRounds; ++i) variant.linear(matrix, input, 0, kRows, 0, kPanels, tile);
    const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
    best_ns = std::min(best_ns, taken.count());
  }
  return 2.0 * kRows * kPanels * kLanes * kColumns * kRounds / best_ns;
}

namespace {

// CPUs' worth of time that the control group allows; a large number where it does not limit.
double cgroup_quota() {
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (v2 >> quota >> period && quota != "max" && period > 0) return std::stod(quota) / period;
  std::ifstream q1("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), p1("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double micros = -1;
  if (q1 >> micros && p1 >> period && micros > 0 && period > 0) return micros / period;
  return 1e9;
}

}  // namespace

int num_usable_cpus() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  const int allowed = sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : 1;
  return std::max(1, static_cast<int>(std::min<double>(allowed, std::ceil(cgroup_quota()))));
}

}  // namespace mainspring
