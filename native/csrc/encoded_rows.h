// Memory for encoded rows, and a look into it, for what binds single kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace mainspring {

class EncodedRows {
 public:
  EncodedRows(int64_t rows, int64_t columns, bool wide)
      : rows_(rows),
        blocks_(columns / kBlock),
        wide_(wide),
        records_((rows + kPair - 1) / kPair * blocks_ * record_bytes(wide)) {}

  Encoded view() { return {records_.data(), static_cast<int32_t>(blocks_ * kBlock), wide_}; }

  // high and low [rows][columns], scales [rows][blocks], sums [rows][blocks][2]. Null: not wanted.
  void take_apart(int8_t* high, int8_t* low, float* scales, int32_t* sums) const {
    for (int64_t at = 0; at < rows_ * blocks_; ++at) {
      const int64_t row = at / blocks_, side = row % kPair;
      const uint8_t* record = records_.data() + (row / kPair * blocks_ + at % blocks_) * record_bytes(wide_);
      const auto* codes = reinterpret_cast<const int8_t*>(record) + side * kBlock;
      const auto* tail = reinterpret_cast<const RecordTail*>(record + codes_bytes(wide_));
      if (high) std::copy_n(codes, kBlock, high + at * kBlock);
      if (low && wide_) std::copy_n(codes + kPair * kBlock, kBlock, low + at * kBlock);
      if (scales) scales[at] = tail->scales[side];
      if (sums) std::copy_n(tail->half_sums[side], kBlock / kGroup, sums + at * (kBlock / kGroup));
    }
  }

 private:
  int64_t rows_, blocks_;
  bool wide_;
  std::vector<uint8_t> records_;
};

}  // namespace mainspring
