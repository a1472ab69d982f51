// What this machine reaches at best, measured: the bounds that kernels are judged by.
#pragma once

#include <vector>

#include "kernels.h"

namespace mainspring {

struct Ceilings {
  int num_threads;
  double byte_products;   // of 8-bit integers, operations per second (a product and its sum are two)
  double float_products;  // of fp32, operations per second
  double model_reads;     // bytes per second of 96 MB, read again and again: the weights of a small model
  double memory_reads;    // bytes per second of more than caches hold
};

// One for each number of threads from 1 to `num_threads`. Takes about 0.1 s, and as much again for each.
std::vector<Ceilings> measure_ceilings(const Kernels&, int num_threads);

}  // namespace mainspring
