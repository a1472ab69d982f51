// Which variants this processor can run, how many threads may be used, and which variant is used.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace mainspring {

// All compiled variants, slowest first.
const std::vector<const Kernels*>& all_variants();
bool can_run(const Kernels& variant);  // by cpuid and what the system saves of the registers
bool has_bf16(const Kernels& variant);  // whether it has, and this processor runs, products of pairs
// Whether they are the faster ones, by a short look: some processors multiply pairs at half the rate of floats.
bool bf16_pays(const Kernels& variant);
// Throws std::invalid_argument where there is none of that name, or this processor cannot run it.
const Kernels& variant_named(const std::string& name);
// Operations per nanosecond of a small product of 4-bit weights: what a short look says of a variant's speed.
double measure(const Kernels& variant);
// Of the affinity mask, limited by the quotas of the process's control group and of those above it; at least 1.
int num_usable_cpus(const std::string& proc = "/proc", const std::string& cgroups = "/sys/fs/cgroup");

}  // namespace mainspring
