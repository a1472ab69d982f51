// Layers of experts: every row goes through a few of many MLPs.
//
// Theory of operation.
// - Of every row its experts are chosen, from scores in float32, by the rules of ExpertShape (ops.py). Then rows are
//   gathered by expert, so that each product reads an expert's weights once for all of its rows.
// - A pass fixes how many units a step has before any row is routed. There are no more experts with rows than rows
//   times top_k, so that many groups have units, and those of groups that are empty do nothing.
// - A row's experts are added up in order of their numbers, and no product depends on a row's neighbours: so what a row
//   gets is the same bits in any batch.
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "steps.h"

namespace mainspring {
namespace {

// ---- who goes where -----------------------------------------------------------------------------------------

constexpr float kTiny = 1e-20f;  // added to a sum of sigmoids, which may all be 0

struct RouteOp final : RowOp {
  int scores;
  ExpertShape shape;
  RouteOp(int scores, ExpertShape shape) : scores(scores), shape(shape) {}
  const char* kind() const override { return "route"; }

  void run(Machine& machine, int row, float* scratch) const override {
    float *likely = scratch, *ranked = scratch + shape.num_experts;
    std::memcpy(likely, row_of(machine.buffer(scores), row), sizeof(float) * shape.num_experts);
    score(likely);
    for (int e = 0; e < shape.num_experts; ++e)
      ranked[e] = shape.correction ? likely[e] + shape.correction[e] : likely[e];
    int* experts = &machine.routes.experts[static_cast<size_t>(row) * shape.top_k];
    float* weights = &machine.routes.weights[static_cast<size_t>(row) * shape.top_k];
    choose(ranked, experts);
    float sum = 0.0f;
    for (int k = 0; k < shape.top_k; ++k) sum += weights[k] = likely[experts[k]];
    for (int k = 0; k < shape.top_k; ++k) {
      if (shape.is_normalised) weights[k] /= sum + kTiny;
      weights[k] *= shape.scale;
    }
    sort(experts, weights);
  }

 private:
  void score(float* x) const {
    const int count = shape.num_experts;
    if (shape.is_sigmoid) {
      for (int e = 0; e < count; ++e) x[e] = 1.0f / (1.0f + std::exp(-x[e]));
      return;
    }
    const float largest = *std::max_element(x, x + count);
    for (int e = 0; e < count; ++e) x[e] = std::exp(x[e] - largest);
    const float sum = std::accumulate(x, x + count, 0.0f);
    for (int e = 0; e < count; ++e) x[e] /= sum;
  }

  // The largest, the first among equals. A NaN is smaller than anything.
  void choose(const float* ranked, int* experts) const {
    int count = 0;
    for (int e = 0; e < shape.num_experts; ++e) {
      if (count == shape.top_k && !is_larger(ranked[e], ranked[experts[count - 1]])) continue;
      int at = count < shape.top_k ? count++ : count - 1;
      for (; at > 0 && is_larger(ranked[e], ranked[experts[at - 1]]); --at) experts[at] = experts[at - 1];
      experts[at] = e;
    }
  }

  static bool is_larger(float a, float b) { return a > b || (std::isnan(b) && !std::isnan(a)); }

  void sort(int* experts, float* weights) const {  // by number: there are few
    for (int k = 1; k < shape.top_k; ++k)
      for (int i = k; i > 0 && experts[i - 1] > experts[i]; --i) {
        std::swap(experts[i - 1], experts[i]);
        std::swap(weights[i - 1], weights[i]);
      }
  }
};

struct GroupStep final : Step {
  int num_here, first, top_k;
  GroupStep(int num_here, int first, int top_k) : num_here(num_here), first(first), top_k(top_k) {}
  std::string kind() const override { return "group"; }
  int num_units(const Machine&) const override { return 1; }
  void run(Machine& machine, int, int) const override {
    Routes& routes = machine.routes;
    const size_t num_choices = static_cast<size_t>(machine.num_rows) * top_k;
    routes.counts.assign(num_here, 0);
    for (size_t i = 0; i < num_choices; ++i)
      if (is_here(routes.experts[i])) ++routes.counts[routes.experts[i] - first];
    routes.groups.clear();
    int begin = 0;
    for (int e = 0; e < num_here; ++e) {
      if (routes.counts[e] == 0) continue;
      routes.groups.push_back({e, begin, routes.counts[e]});
      const int next = begin;
      begin += (routes.counts[e] + kPair - 1) / kPair * kPair;
      routes.counts[e] = next;  // from now on, where its next row goes
    }
    for (size_t i = 0; i < num_choices; ++i)
      routes.places[i] = is_here(routes.experts[i]) ? routes.counts[routes.experts[i] - first]++ : -1;
  }
  bool is_here(int expert) const { return expert >= first && expert < first + num_here; }
};

// Row `from_row` of encoded rows becomes row `to_row` of others.
void copy_encoded(const Encoded& from, int from_row, const Encoded& to, int to_row) {
  const int num_blocks = from.columns / kBlock, bytes = record_bytes(from.wide);
  const uint8_t* source = from.records + static_cast<int64_t>(from_row / kPair) * num_blocks * bytes;
  uint8_t* target = to.records + static_cast<int64_t>(to_row / kPair) * num_blocks * bytes;
  const int a = from_row % kPair, b = to_row % kPair;
  for (int block = 0; block < num_blocks; ++block, source += bytes, target += bytes) {
    for (int part = 0; part < (from.wide ? 2 : 1); ++part) {  // high, then low
      const int at = part * kPair * kBlock;
      std::memcpy(target + at + b * kBlock, source + at + a * kBlock, kBlock);
    }
    const auto* tail = reinterpret_cast<const RecordTail*>(source + codes_bytes(from.wide));
    auto* copy = reinterpret_cast<RecordTail*>(target + codes_bytes(from.wide));
    copy->scales[b] = tail->scales[a];
    copy->sums[b] = tail->sums[a];
    std::memcpy(copy->powers[b], tail->powers[a], sizeof tail->powers[a]);
    std::memcpy(copy->half_sums[b], tail->half_sums[a], sizeof tail->half_sums[a]);
  }
}

void copy_rounded(const Rounded& from, int from_row, const Rounded& to, int to_row) {
  const int64_t pitch = from.pitch();
  std::memcpy(to.rows + to_row * pitch, from.rows + from_row * pitch, sizeof(uint16_t) * pitch);
}

struct GatherOp final : RowOp {
  int gathered, x, top_k;
  GatherOp(int gathered, int x, int top_k) : gathered(gathered), x(x), top_k(top_k) {}
  const char* kind() const override { return "gather"; }
  void run(Machine& machine, int row, float*) const override {
    const Buffer &from = machine.buffer(x), &to = machine.buffer(gathered);
    const int* places = &machine.routes.places[static_cast<size_t>(row) * top_k];
    for (int k = 0; k < top_k; ++k) {
      if (places[k] < 0) continue;
      if (to.rows) std::memcpy(row_of(to, places[k]), row_of(from, row), sizeof(float) * to.width);
      if (to.wants_encoded) copy_encoded(from.encoded, row, to.encoded, places[k]);
      if (to.wants_rounded) copy_rounded(from.rounded, row, to.rounded, places[k]);
    }
  }
};

// ---- products -----------------------------------------------------------------------------------------------

constexpr int kPanelsPerUnit = 4;  // 64 columns: whole blocks

// A unit: some columns of one expert, for all of its rows, so that their weights are read from memory once. Units of an
// expert follow one another.
class GroupProduct : public Step {
 public:
  GroupProduct(int num_here, int top_k, int width)
      : num_here_(num_here), top_k_(top_k), width_(width), num_panels_((width + kLanes - 1) / kLanes) {}
  int num_units(const Machine& machine) const override {
    const auto most_groups = std::min(static_cast<int64_t>(num_here_), static_cast<int64_t>(machine.num_rows) * top_k_);
    return static_cast<int>(most_groups) * units_of_group();
  }
  void run(Machine& machine, int unit, int thread) const override {
    const size_t index = unit / units_of_group();
    if (index >= machine.routes.groups.size()) return;
    const Routes::Group& group = machine.routes.groups[index];
    const int panel = unit % units_of_group() * kPanelsPerUnit;
    const int panels = std::min(kPanelsPerUnit, num_panels_ - panel);
    for (int done = 0; done < group.count; done += kRowsPerUnit) {
      const int rows = std::min(kRowsPerUnit, group.count - done);
      multiply(machine, group.expert, group.begin + done, rows, panel, panels, machine.scratch(thread));
    }
  }

 protected:
  int columns_of(int panel, int panels) const { return std::min(panels * kLanes, width_ - panel * kLanes); }

 private:
  int units_of_group() const { return (num_panels_ + kPanelsPerUnit - 1) / kPanelsPerUnit; }
  virtual void multiply(Machine&, int expert, int row, int rows, int panel, int panels, float* scratch) const = 0;

  int num_here_, top_k_, width_, num_panels_;
};

using Experts = std::shared_ptr<const std::vector<Expert>>;

class InnerStep final : public GroupProduct {
 public:
  InnerStep(int inner, int gathered, Experts experts, const ExpertShape& shape)
      : GroupProduct(static_cast<int>(experts->size()), shape.top_k, experts->front().gate->rows),
        inner_(inner),
        gathered_(gathered),
        experts_(std::move(experts)),
        activation_(shape.activation) {}
  std::string kind() const override { return "experts_inner"; }

 private:
  void multiply(Machine& machine, int expert, int row, int rows, int panel, int panels,
                float* scratch) const override {
    const auto& [gate, up, down] = (*experts_)[expert];
    const Buffer &source = machine.buffer(gathered_), &buffer = machine.buffer(inner_);
    const int first = panel * kLanes, pitch = panels * kLanes, count = columns_of(panel, panels);
    float *a = scratch, *b = scratch + kRowsPerUnit * kPanelsPerUnit * kLanes;
    machine.kernels.linear(*gate, input_of(source, *gate), row, rows, panel, panels, {a, pitch, false});
    machine.kernels.linear(*up, input_of(source, *up), row, rows, panel, panels, {b, pitch, false});
    for (int r = 0; r < rows; ++r) {
      float* y = buffer.rows ? row_of(buffer, row + r) + first : a + r * pitch;
      machine.kernels.gate(activation_, a + r * pitch, b + r * pitch, count, y);
      encode_if_wanted(machine, buffer, y, row + r, first, count);
    }
  }

  int inner_, gathered_;
  Experts experts_;
  Activation activation_;
};

class DownStep final : public GroupProduct {
 public:
  DownStep(int parts, int inner, Experts experts, const ExpertShape& shape)
      : GroupProduct(static_cast<int>(experts->size()), shape.top_k, experts->front().down->rows),
        parts_(parts),
        inner_(inner),
        experts_(std::move(experts)) {}
  std::string kind() const override { return "experts_down"; }

 private:
  void multiply(Machine& machine, int expert, int row, int rows, int panel, int panels, float*) const override {
    const Matrix& down = *(*experts_)[expert].down;
    const Buffer& buffer = machine.buffer(parts_);
    machine.kernels.linear(down, input_of(machine.buffer(inner_), down), row, rows, panel, panels,
                           {row_of(buffer, row) + panel * kLanes, buffer.width, false});
  }

  int parts_, inner_;
  Experts experts_;
};

struct CombineOp final : RowOp {
  int out, parts, top_k;
  CombineOp(int out, int parts, int top_k) : out(out), parts(parts), top_k(top_k) {}
  const char* kind() const override { return "combine"; }
  void run(Machine& machine, int row, float* scratch) const override {
    const Buffer &buffer = machine.buffer(out), &said = machine.buffer(parts);
    const size_t at = static_cast<size_t>(row) * top_k;
    float* y = place(buffer, row, scratch);
    std::memset(y, 0, sizeof(float) * buffer.width);
    for (int k = 0; k < top_k; ++k) {
      if (machine.routes.places[at + k] < 0) continue;
      float* part = row_of(said, machine.routes.places[at + k]);  // read once, so changed where it is
      machine.kernels.multiply(part, machine.routes.weights[at + k], buffer.width);
      machine.kernels.add(y, part, buffer.width);
    }
    encode_if_wanted(machine, buffer, y, row, 0, buffer.width);
  }
};

}  // namespace

void append_experts(Program& program, int out, int x, int scores, ExpertBuffers buffers, std::vector<Expert> experts,
                    ExpertShape shape) {
  Routes& routes = program.machine().routes;
  routes.most_chosen = std::max(routes.most_chosen, shape.top_k);
  const auto num_here = static_cast<int>(experts.size());
  const auto all = std::make_shared<const std::vector<Expert>>(std::move(experts));
  program.append(rows_step<RouteOp>(scores, shape));
  program.append(std::make_unique<GroupStep>(num_here, shape.first, shape.top_k));
  program.append(rows_step<GatherOp>(buffers.gathered, x, shape.top_k));
  program.append(std::make_unique<InnerStep>(buffers.inner, buffers.gathered, all, shape));
  program.append(std::make_unique<DownStep>(buffers.parts, buffers.inner, all, shape));
  program.append(rows_step<CombineOp>(out, buffers.parts, shape.top_k));
}

}  // namespace mainspring
