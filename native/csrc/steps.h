// What the steps of a program are made of: those over rows, and what products have in common.
#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "program.h"

namespace mainspring {

// ---- steps over rows ----------------------------------------------------------------------------------------

// Rows are cut into about four pieces a thread.
struct RowCut {
  explicit RowCut(const Machine& machine) {
    size = (machine.num_rows + 4 * machine.pool->num_threads() - 1) / (4 * machine.pool->num_threads());
    count = (machine.num_rows + size - 1) / size;
  }
  int size, count;
};

// What is done to one row after another, and touches nothing of other rows.
class RowOp {
 public:
  virtual ~RowOp() = default;
  virtual const char* kind() const = 0;
  virtual void run(Machine&, int row, float* scratch) const = 0;
};

class RowsStep final : public Step {
 public:
  explicit RowsStep(std::unique_ptr<RowOp> op) { ops_.push_back(std::move(op)); }
  std::string kind() const override {
    std::string all;
    for (const auto& op : ops_) {
      if (!all.empty()) all += '+';
      all += op->kind();
    }
    return all;
  }
  int num_units(const Machine& machine) const override { return RowCut(machine).count; }
  void run(Machine& machine, int unit, int thread) const override {
    const RowCut cut(machine);
    const int end = std::min(machine.num_rows, (unit + 1) * cut.size);
    for (int row = unit * cut.size; row < end; ++row)
      for (const auto& op : ops_) op->run(machine, row, machine.scratch(thread));
  }
  bool take_over(Step& next) override {
    auto* rows = dynamic_cast<RowsStep*>(&next);
    if (rows) std::move(rows->ops_.begin(), rows->ops_.end(), std::back_inserter(ops_));
    return rows;
  }

 private:
  std::vector<std::unique_ptr<RowOp>> ops_;
};

template <typename Op, typename... Args>
std::unique_ptr<Step> rows_step(Args... args) {
  return std::make_unique<RowsStep>(std::make_unique<Op>(args...));
}

inline float* row_of(const Buffer& buffer, int row) {
  return buffer.rows ? buffer.rows + static_cast<int64_t>(row) * buffer.width : nullptr;
}

// Where a step computes a row of `buffer`: in place, or in scratch if it is not kept as floats.
inline float* place(const Buffer& buffer, int row, float* scratch) { return buffer.rows ? row_of(buffer, row) : scratch; }

// Encode, round, both or neither: whatever `buffer` wants.
inline void encode_if_wanted(Machine& machine, const Buffer& buffer, const Rows& rows, int row, int column) {
  if (buffer.wants_encoded) machine.kernels.encode(rows, buffer.encoded, row, column);
  if (buffer.wants_rounded) machine.kernels.round_to_bf16(rows, buffer.rounded, row, column);
}
inline void encode_if_wanted(Machine& machine, const Buffer& buffer, const float* x, int row, int column, int count) {
  encode_if_wanted(machine, buffer, Rows{x, 0, 1, count}, row, column);
}

// ---- products -----------------------------------------------------------------------------------------------

constexpr int kFewRows = 4;  // so few are bound by reading weights
constexpr int kRowsPerUnit = 48;  // of one call of a kernel

inline int panels_of(const Matrix& matrix) { return (matrix.rows + kLanes - 1) / kLanes; }

inline bool is_quantised(const Matrix& matrix) { return matrix.form == Form::Q8 || matrix.form == Form::Q4; }

inline Input input_of(const Buffer& buffer, const Matrix& matrix) {
  if (is_quantised(matrix)) return {nullptr, buffer.encoded, {}};
  if (matrix.form == Form::BF16 && buffer.wants_rounded) return {nullptr, {}, buffer.rounded};
  return {buffer.rows, {}, {}};
}

}  // namespace mainspring
