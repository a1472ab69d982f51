#include "cpu.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <stdexcept>
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

bool has_bf16(const Kernels& variant) {
  return &variant == &kernels_avx512 && can_run(variant) && __builtin_cpu_supports("avx512bf16");
}

const Kernels& variant_named(const std::string& name) {
  for (const Kernels* variant : all_variants()) {
    if (name != variant->name) continue;
    if (can_run(*variant)) return *variant;
    throw std::invalid_argument("this processor cannot run the variant " + name);
  }
  throw std::invalid_argument("there is no variant " + name);
}

namespace {

// Work to look at: all of it stays in the first-level cache, or nearly.
constexpr int kRows = 12, kPanels = 4, kColumns = 512;

double operations_per_ns(const Kernels& variant, const Matrix& matrix, const Input& input) {
  constexpr int kRounds = 16, kWindows = 12;
  alignas(64) float tile[kRows * kPanels * kLanes];
  const Output out{tile, kPanels * kLanes, false};
  double best_ns = std::numeric_limits<double>::infinity();
  for (int window = 0; window < kWindows; ++window) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kRounds; ++i) variant.linear(matrix, input, 0, kRows, 0, kPanels, out);
    const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
    best_ns = std::min(best_ns, taken.count());
  }
  return 2.0 * kRows * kPanels * kLanes * kColumns * kRounds / best_ns;
}

}  // namespace

double measure(const Kernels& variant) {
  constexpr int kBlocks = kColumns / kBlock;
  alignas(64) static uint8_t codes[kPanels * kLanes * kColumns / 2];
  alignas(64) static uint16_t scales[kPanels * kLanes * kBlocks];
  alignas(64) uint8_t records[kRows / kPair * kBlocks * record_bytes(false)] = {};
  const Matrix matrix{Form::Q4, kPanels * kLanes, kColumns, 8, codes, scales, nullptr, kLanes * kColumns / 2};
  return operations_per_ns(variant, matrix, {nullptr, {records, kColumns, false}, {}});
}

bool bf16_pays(const Kernels& variant) {
  if (!has_bf16(variant)) return false;
  constexpr double kWorthIt = 1.25;  // of rounding more; the rates differ by a factor of two, this way or that
  alignas(64) static uint8_t codes[kPanels * kLanes * kColumns * 2];
  alignas(64) static float rows[kRows * kColumns];
  const Matrix matrix{Form::BF16, kPanels * kLanes, kColumns, 0, codes, nullptr, nullptr, kLanes * kColumns * 2};
  const Rounded rounded{reinterpret_cast<uint16_t*>(rows), kColumns};
  return operations_per_ns(variant, matrix, {nullptr, {}, rounded}) >
         kWorthIt * operations_per_ns(variant, matrix, {rows, {}, {}});
}

namespace {

constexpr double kNoLimit = 1e9;

// CPUs' worth of time that one group may use by its own limit: in version 2 "quota period" or "max period", in
// version 1 a file for each, -1 for no quota. Microseconds.
double quota_of(const std::string& group, bool version_2) {
  double quota = -1, period = 0;
  if (version_2) {
    std::ifstream(group + "/cpu.max") >> quota >> period;  // "max" is no number
  } else {
    std::ifstream(group + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(group + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? quota / period : kNoLimit;
}

// The least that the process's group and those above it allow. Lines are "number:controllers:path"; version 2 has
// no controllers. In a container the path may be one of the host, of which only the root is to be seen.
double cgroup_quota(const std::string& proc, const std::string& cgroups) {
  double least = kNoLimit;
  std::ifstream lines(proc + "/self/cgroup");
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool version_2 = controllers == ",,";
    if (!version_2 && controllers.find(",cpu,") == std::string::npos) continue;
    const std::string root = cgroups + (version_2 ? "" : "/cpu");
    std::string path = line.substr(second + 1);
    while (true) {
      least = std::min(least, quota_of(root + path, version_2));
      const size_t slash = path.rfind('/');
      if (slash == std::string::npos) break;
      path.resize(slash);
    }
  }
  return least;
}

}  // namespace

int num_usable_cpus(const std::string& proc, const std::string& cgroups) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  const int allowed = sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : 1;
  return std::max(1, static_cast<int>(std::min<double>(allowed, std::ceil(cgroup_quota(proc, cgroups)))));
}

}  // namespace mainspring
