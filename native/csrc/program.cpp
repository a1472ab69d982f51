#include "program.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <new>
#include <utility>

#include "steps.h"

namespace mainspring {

// ---- memory -------------------------------------------------------------------------------------------------

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

size_t rounded(size_t bytes) { return (std::max<size_t>(bytes, 1) + kHugePage - 1) / kHugePage * kHugePage; }

}  // namespace

Memory::Memory(size_t bytes) : bytes_(rounded(bytes)) {
  // A page too many, so that the part that is used can begin at a huge page.
  void* all = mmap(nullptr, bytes_ + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
  if (all == MAP_FAILED) throw std::bad_alloc();
  auto* start = static_cast<uint8_t*>(all);
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(start) % kHugePage) % kHugePage;
  if (before) munmap(start, before);
  data_ = start + before;
  if (kHugePage - before) munmap(data_ + bytes_, kHugePage - before);
  madvise(data_, bytes_, MADV_HUGEPAGE);  // a wish: it may be refused
}

Memory::~Memory() { munmap(data_, bytes_); }

// ---- machine ------------------------------------------------------------------------------------------------

Machine::Machine(std::shared_ptr<Pool> pool, const Kernels& kernels, bool int16)
    : kernels(kernels),
      int16(int16),
      pool(std::move(pool)),
      scratch_(std::make_unique<Memory>(sizeof(float) * kScratch * this->pool->num_threads())) {}

Machine::~Machine() {
  for (Plan& plan : plans)
    if (plan.plan) destroy_plan(plan.plan);
}

int Machine::add_buffer(int width, int copies) {
  Buffer buffer{};
  buffer.width = width;
  buffer.copies = copies;
  buffers_.push_back(std::move(buffer));
  return static_cast<int>(buffers_.size()) - 1;
}

void Machine::want(int id, bool rows, bool encoded, bool rounded) {
  buffers_[id].wants_rows |= rows;
  buffers_[id].wants_encoded |= encoded;
  buffers_[id].wants_rounded |= rounded;
  buffers_[id].capacity = 0;
}

void Machine::reserve(int rows) {
  for (Buffer& buffer : buffers_) {
    if (rows <= buffer.capacity) continue;
    buffer.capacity = rows;
    const size_t num_rows = static_cast<size_t>(rows) * buffer.copies;
    const size_t floats = (num_rows * buffer.width + 15) / 16 * 16;
    const size_t num_records = (num_rows + kPair - 1) / kPair * (buffer.width / kBlock);
    buffer.rounded.columns = buffer.width;
    const size_t float_bytes = buffer.wants_rows ? sizeof(float) * floats : 0;
    const size_t encoded_bytes = buffer.wants_encoded ? num_records * record_bytes(int16) : 0;
    const size_t rounded_bytes = buffer.wants_rounded ? sizeof(uint16_t) * num_rows * buffer.rounded.pitch() : 0;
    buffer.memory = std::make_shared<Memory>(float_bytes + encoded_bytes + rounded_bytes);
    uint8_t* at = buffer.memory->data();
    buffer.rows = buffer.wants_rows ? reinterpret_cast<float*>(at) : nullptr;
    at += float_bytes;
    buffer.encoded = {buffer.wants_encoded ? at : nullptr, buffer.width, int16};
    at += encoded_bytes;
    buffer.rounded.rows = buffer.wants_rounded ? reinterpret_cast<uint16_t*>(at) : nullptr;
  }
}

int Machine::add_rope(std::vector<double> frequencies, double amplitude) {
  ropes.push_back({std::move(frequencies), amplitude, {}, {}});
  return static_cast<int>(ropes.size()) - 1;
}

int Machine::attention_plan(const AttentionKey& key) {
  for (size_t i = 0; i < plans.size(); ++i)
    if (plans[i].key == key) return static_cast<int>(i);
  plans.push_back({key, nullptr});
  return static_cast<int>(plans.size()) - 1;
}

void Machine::allocate_kv(std::vector<KVCache> layers, std::vector<std::unique_ptr<Memory>> memory) {
  kv = std::move(layers);
  kv_memory_ = std::move(memory);
}

// ---- a pass -------------------------------------------------------------------------------------------------

namespace {

class Replay : public Pass {
 public:
  Replay(Machine& machine, const std::vector<std::unique_ptr<Step>>& steps) : machine_(machine), steps_(steps) {}
  int num_steps() const override { return static_cast<int>(steps_.size()); }
  int num_units(int step) const override { return steps_[step]->num_units(machine_); }
  // Few rows ask for weights a page ahead, in vain if what follows is another thread's.
  bool in_runs(int) const override { return machine_.num_rows <= kFewRows; }
  void run(int step, int unit, int thread) override { steps_[step]->run(machine_, unit, thread); }

 protected:
  Machine& machine_;
  const std::vector<std::unique_ptr<Step>>& steps_;
};

int64_t processor_time_ns() {  // of this thread
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{1000000000} * now.tv_sec + now.tv_nsec;
}

class TimedReplay final : public Replay {
 public:
  TimedReplay(Machine& machine, const std::vector<std::unique_ptr<Step>>& steps, std::vector<int64_t>& taken_ns)
      : Replay(machine, steps), taken_ns_(taken_ns) {
    taken_ns.assign(steps.size() * machine.pool->num_threads(), 0);
  }
  void run(int step, int unit, int thread) override {
    const int64_t start_ns = processor_time_ns();
    Replay::run(step, unit, thread);
    taken_ns_[thread * steps_.size() + step] += processor_time_ns() - start_ns;
  }

 private:
  std::vector<int64_t>& taken_ns_;
};

class OutsideStep final : public Step {
 public:
  OutsideStep(std::function<void()> call, std::exception_ptr& failure) : call_(std::move(call)), failure_(failure) {}
  std::string kind() const override { return "outside"; }
  int num_units(const Machine&) const override { return 1; }
  void run(Machine&, int, int) const override {
    if (failure_) return;
    try {
      call_();
    } catch (...) {
      failure_ = std::current_exception();
    }
  }

 private:
  std::function<void()> call_;
  std::exception_ptr& failure_;  // of the program, which outlives its steps; steps see each other's writes
};

}  // namespace

void Program::append_outside(std::function<void()> call) {
  append(std::make_unique<OutsideStep>(std::move(call), failure_));
}

void Program::run() {
  Machine& machine = *machine_;
  failure_ = nullptr;
  if (machine.num_rows == 0) return;
  machine.routes.reserve(machine.num_rows);
  if (machine.batch.num_requests) {
    for (auto& rope : machine.ropes) {
      rope.cosines.resize(rope.frequencies.size() * machine.num_rows);
      rope.sines.resize(rope.cosines.size());
    }
    int64_t partials = 0;
    for (Machine::Plan& plan : machine.plans) {
      plan.plan = plan_attention(plan.plan, machine.batch, machine.tables[plan.key.group], plan.key.shape,
                                 machine.kv[0].block_size);
      partials = std::max(partials, num_partials(*plan.plan));
    }
    if (static_cast<int64_t>(machine.partials.size()) < partials) machine.partials.resize(partials);
  }
  if (keeps_times_) {
    TimedReplay replay(machine, steps_, taken_ns_);
    machine.pool->run(replay);
  } else {
    Replay replay(machine, steps_);
    machine.pool->run(replay);
  }
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

std::vector<StepTime> Program::times() const {
  std::vector<StepTime> times;
  for (size_t s = 0; s < steps_.size() && !taken_ns_.empty(); ++s) {
    times.push_back({steps_[s]->kind(), 0});
    for (size_t at = s; at < taken_ns_.size(); at += steps_.size()) times[s].taken_ns += taken_ns_[at];
  }
  return times;
}

// ---- steps over rows ----------------------------------------------------------------------------------------

namespace {

// Pointwise `what` to elements [column, column + count) of a row.
void apply(const Machine& machine, const Pointwise& what, float* x, int column, int count) {
  switch (what.kind) {
    case Pointwise::Kind::Bias:
      return machine.kernels.add(x, what.bias + column, count);
    case Pointwise::Kind::Multiply:
      return machine.kernels.multiply(x, what.number, count);
    case Pointwise::Kind::SoftCap:
      return machine.kernels.soft_cap(x, what.number, count);
    case Pointwise::Kind::Activate:
      return machine.kernels.activate(what.activation, x, count, x);
  }
}

struct EmbeddingOp final : RowOp {
  int out;
  const Matrix* matrix;
  EmbeddingOp(int out, const Matrix* matrix) : out(out), matrix(matrix) {}
  const char* kind() const override { return "embedding"; }
  void run(Machine& machine, int row, float* scratch) const override {
    Buffer& buffer = machine.buffer(out);
    float* x = place(buffer, row, scratch);
    machine.kernels.embed(*matrix, machine.batch.token_ids[row], x);
    encode_if_wanted(machine, buffer, x, row, 0, buffer.width);
  }
};

struct AddPositionOp final : RowOp {
  int out;
  const Matrix* matrix;
  AddPositionOp(int out, const Matrix* matrix) : out(out), matrix(matrix) {}
  const char* kind() const override { return "add_position"; }
  void run(Machine& machine, int row, float* scratch) const override {
    Buffer& buffer = machine.buffer(out);
    machine.kernels.embed(*matrix, machine.batch.positions[row], scratch);
    machine.kernels.add(row_of(buffer, row), scratch, buffer.width);
    encode_if_wanted(machine, buffer, row_of(buffer, row), row, 0, buffer.width);
  }
};

struct NormOp final : RowOp {
  int out, x;
  const float *weight, *bias;  // of a layer norm; null: it is a root-mean-square norm
  float eps;
  NormOp(int out, int x, const float* weight, const float* bias, float eps)
      : out(out), x(x), weight(weight), bias(bias), eps(eps) {}
  const char* kind() const override { return "norm"; }
  void run(Machine& machine, int row, float* scratch) const override {
    Buffer& buffer = machine.buffer(out);
    const float* source = row_of(machine.buffer(x), row);
    float* y = place(buffer, row, scratch);
    if (bias) {
      machine.kernels.layer_norm(source, weight, bias, eps, buffer.width, y);
    } else {
      machine.kernels.rms_norm(source, weight, eps, buffer.width, y);
    }
    encode_if_wanted(machine, buffer, y, row, 0, buffer.width);
  }
};

struct HeadNormOp final : RowOp {
  int x, first, num_heads;
  const float* weight;
  int head_size;
  float eps;
  HeadNormOp(int x, int first, int num_heads, const float* weight, int head_size, float eps)
      : x(x), first(first), num_heads(num_heads), weight(weight), head_size(head_size), eps(eps) {}
  const char* kind() const override { return "head_norm"; }
  void run(Machine& machine, int row, float*) const override {
    float* head = row_of(machine.buffer(x), row) + first;
    for (int h = 0; h < num_heads; ++h, head += head_size)
      machine.kernels.rms_norm(head, weight, eps, head_size, head);
  }
};

struct AddOp final : RowOp {
  int out, x;
  AddOp(int out, int x) : out(out), x(x) {}
  const char* kind() const override { return "add"; }
  void run(Machine& machine, int row, float*) const override {
    Buffer& buffer = machine.buffer(out);
    machine.kernels.add(row_of(buffer, row), row_of(machine.buffer(x), row), buffer.width);
    encode_if_wanted(machine, buffer, row_of(buffer, row), row, 0, buffer.width);
  }
};

struct ScaleRowsOp final : RowOp {
  int out, x;
  ScaleRowsOp(int out, int x) : out(out), x(x) {}
  const char* kind() const override { return "scale_rows"; }
  void run(Machine& machine, int row, float*) const override {
    Buffer& buffer = machine.buffer(out);
    float* y = row_of(buffer, row);
    machine.kernels.multiply(y, 1.0f / (1.0f + std::exp(-*row_of(machine.buffer(x), row))), buffer.width);
    encode_if_wanted(machine, buffer, y, row, 0, buffer.width);
  }
};

struct PointwiseOp final : RowOp {
  int out, x;
  Pointwise what;
  PointwiseOp(int out, int x, Pointwise what) : out(out), x(x), what(what) {}
  const char* kind() const override { return "pointwise"; }
  void run(Machine& machine, int row, float* scratch) const override {
    Buffer& buffer = machine.buffer(out);
    const float* source = row_of(machine.buffer(x), row);
    float* y = place(buffer, row, scratch);
    if (y != source) std::memcpy(y, source, sizeof(float) * buffer.width);
    apply(machine, what, y, 0, buffer.width);
    encode_if_wanted(machine, buffer, y, row, 0, buffer.width);
  }
};

struct GateOp final : RowOp {
  int out, x;
  Activation activation;
  GateOp(int out, int x, Activation activation) : out(out), x(x), activation(activation) {}
  const char* kind() const override { return "gate"; }
  void run(Machine& machine, int row, float* scratch) const override {
    Buffer& buffer = machine.buffer(out);
    const float* gate = row_of(machine.buffer(x), row);
    float* y = place(buffer, row, scratch);
    machine.kernels.gate(activation, gate, gate + buffer.width, buffer.width, y);
    encode_if_wanted(machine, buffer, y, row, 0, buffer.width);
  }
};

struct EncodeOp final : RowOp {
  int x;
  explicit EncodeOp(int x) : x(x) {}
  const char* kind() const override { return "encode"; }
  void run(Machine& machine, int row, float*) const override {
    Buffer& buffer = machine.buffer(x);
    encode_if_wanted(machine, buffer, row_of(buffer, row), row, 0, buffer.width);
  }
};

struct AnglesOp final : RowOp {
  int rope;
  explicit AnglesOp(int rope) : rope(rope) {}
  const char* kind() const override { return "angles"; }
  void run(Machine& machine, int row, float*) const override {
    Machine::Rope& r = machine.ropes[rope];
    const size_t n = r.frequencies.size(), at = row * n;
    for (size_t i = 0; i < n; ++i) {
      const double angle = machine.batch.positions[row] * r.frequencies[i];
      r.cosines[at + i] = static_cast<float>(r.amplitude * std::cos(angle));
      r.sines[at + i] = static_cast<float>(r.amplitude * std::sin(angle));
    }
  }
};

struct RopeOp final : RowOp {
  int x, rope, num_heads, head_size;
  bool interleaved;
  RopeOp(int x, int rope, int num_heads, int head_size, bool interleaved)
      : x(x), rope(rope), num_heads(num_heads), head_size(head_size), interleaved(interleaved) {}
  const char* kind() const override { return "rope"; }
  void run(Machine& machine, int row, float*) const override {
    const Machine::Rope& r = machine.ropes[rope];
    const size_t n = r.frequencies.size(), at = row * n;
    machine.kernels.rope(row_of(machine.buffer(x), row), &r.cosines[at], &r.sines[at], static_cast<int>(n), num_heads,
                         head_size, interleaved);
  }
};

struct WriteKVOp final : RowOp {
  int qkv, layer, plan, q_width;
  WriteKVOp(int qkv, int layer, int plan, int q_width) : qkv(qkv), layer(layer), plan(plan), q_width(q_width) {}
  const char* kind() const override { return "write_kv"; }
  void run(Machine& machine, int row, float*) const override {
    const int64_t slot = machine.tables[machine.plans[plan].key.group].slots[row];
    if (slot >= 0) machine.kernels.write_kv(machine.kv[layer], row_of(machine.buffer(qkv), row) + q_width, slot);
    if (row == 0) rewind(*machine.plans[plan].plan);  // the layer's attention comes next
  }
};

// ---- attention ----------------------------------------------------------------------------------------------

struct AttentionStep final : Step {
  int out, qkv, layer, plan;
  AttentionStep(int out, int qkv, int layer, int plan) : out(out), qkv(qkv), layer(layer), plan(plan) {}
  std::string kind() const override { return "attention"; }
  int num_units(const Machine& machine) const override { return mainspring::num_units(*machine.plans[plan].plan); }
  void run(Machine& machine, int unit, int thread) const override {
    const Buffer &q = machine.buffer(qkv), &result = machine.buffer(out);
    const AttentionShape& shape = machine.plans[plan].key.shape;
    // A KV head's part of a row is encoded here if it is whole blocks; if not, an EncodeOp follows.
    const bool whole = shape.num_heads / shape.num_kv_heads * shape.head_size % kBlock == 0;
    const AttentionArgs args{machine.plans[plan].plan, q.rows, q.width, result.rows, whole ? result.encoded : Encoded{},
                             whole ? result.rounded : Rounded{}, machine.kv[layer], shape, machine.partials.data()};
    machine.kernels.attend(args, unit, machine.scratch(thread));
  }
};

// ---- products -----------------------------------------------------------------------------------------------

// A unit of a product: some rows by some panels of 16 columns. Rows go round fastest, so that threads work on the
// same weights at a time. Every tile of a unit's rows walks all its panels, and at the end of that walk what is asked
// for ahead is not what comes next: the more panels, the better, as long as there are units for all threads.
constexpr int kMostPanels = 8, kManyRows = 256;

struct Cut {
  Cut(int num_rows, int num_panels) : num_rows(num_rows), num_panels(num_panels) {
    panels = num_rows >= kManyRows ? kMostPanels : num_panels >= 64 || num_rows > 8 ? 4 : 2;
    rows = std::min(num_rows, kRowsPerUnit);
    row_units = (num_rows + rows - 1) / rows;
    count = row_units * ((num_panels + panels - 1) / panels);
  }
  int num_rows, num_panels, rows, panels, row_units, count;
  int row(int unit) const { return unit % row_units * rows; }
  int panel(int unit) const { return unit / row_units * panels; }
  int rows_of(int unit) const { return std::min(rows, num_rows - row(unit)); }
  int panels_of(int unit) const { return std::min(panels, num_panels - panel(unit)); }
};

struct LinearStep final : Step {
  int out, x;
  std::vector<Part> parts;
  std::vector<Pointwise> then;
  Into into;
  bool whole = true;  // blocks of 32 columns by every unit, which are encoded here; if not, an EncodeOp follows
  LinearStep(int out, int x, std::vector<Part> all_parts, std::vector<Pointwise> then, Into into)
      : out(out), x(x), parts(std::move(all_parts)), then(std::move(then)), into(into) {
    for (const Part& part : parts) whole &= part.matrix->rows % kBlock == 0;
  }
  std::string kind() const override { return into == Into::Add ? "linear_add" : "linear"; }
  int num_units(const Machine& machine) const override {
    int units = 0;
    for (const Part& part : parts) units += Cut(machine.num_rows, panels_of(*part.matrix)).count;
    return units;
  }
  void run(Machine& machine, int unit, int thread) const override {
    for (const Part& part : parts) {
      const Cut cut(machine.num_rows, panels_of(*part.matrix));
      if (unit < cut.count) return run_part(machine, part, cut, unit, machine.scratch(thread));
      unit -= cut.count;
    }
  }
  void run_part(Machine& machine, const Part& part, const Cut& cut, int unit, float* tile) const {
    const int row = cut.row(unit), rows = cut.rows_of(unit), panel = cut.panel(unit), panels = cut.panels_of(unit);
    const int column = part.column + panel * kLanes;
    const Buffer& buffer = machine.buffer(out);
    // By way of a tile only what is changed and then added, or has no place of its own.
    const bool direct = buffer.rows && (into == Into::Store || then.empty());
    const Output output = direct ? Output{row_of(buffer, row) + column, buffer.width, into == Into::Add}
                                 : Output{tile, panels * kLanes, false};
    machine.kernels.linear(*part.matrix, input_of(machine.buffer(x), *part.matrix), row, rows, panel, panels, output);
    if (direct && then.empty() && !buffer.wants_encoded && !buffer.wants_rounded) return;
    const int count = std::min(panels * kLanes, part.matrix->rows - panel * kLanes);
    for (int r = 0; r < rows; ++r) {
      float* y = output.at + r * output.pitch;
      for (const Pointwise& what : then) apply(machine, what, y, column, count);
      if (buffer.rows && !direct) {
        float* sum = row_of(buffer, row + r) + column;
        machine.kernels.add(sum, y, count);
        y = sum;
      }
      if (whole) encode_if_wanted(machine, buffer, y, row + r, column, count);
    }
  }
};

struct GatedStep final : Step {
  int out, x;
  const Matrix *gate, *up;
  const float* bias;
  Activation activation;
  GatedStep(int out, int x, const Matrix* gate, const Matrix* up, const float* bias, Activation activation)
      : out(out), x(x), gate(gate), up(up), bias(bias), activation(activation) {}
  std::string kind() const override { return "gated"; }
  // Units of whole blocks of 32 columns, for they are encoded here.
  Cut cut(const Machine& machine) const { return Cut(machine.num_rows, panels_of(*gate)); }
  int num_units(const Machine& machine) const override { return cut(machine).count; }
  void run(Machine& machine, int unit, int thread) const override {
    const Cut c = cut(machine);
    const int row = c.row(unit), rows = c.rows_of(unit), panel = c.panel(unit), panels = c.panels_of(unit);
    float* a = machine.scratch(thread);
    float* b = a + kRowsPerUnit * kMostPanels * kLanes;
    const Buffer& source = machine.buffer(x);
    const int first = panel * kLanes, pitch = panels * kLanes;  // whole panels: a part's rows are whole blocks
    machine.kernels.linear(*gate, input_of(source, *gate), row, rows, panel, panels, {a, pitch, false});
    machine.kernels.linear(*up, input_of(source, *up), row, rows, panel, panels, {b, pitch, false});
    for (int r = 0; bias && r < rows; ++r) {
      machine.kernels.add(a + r * pitch, bias + first, pitch);
      machine.kernels.add(b + r * pitch, bias + gate->rows + first, pitch);
    }
    machine.kernels.gate(activation, a, b, rows * pitch, a);
    const Buffer& buffer = machine.buffer(out);
    for (int r = 0; buffer.rows && r < rows; ++r)
      std::memcpy(row_of(buffer, row + r) + first, a + r * pitch, sizeof(float) * pitch);
    encode_if_wanted(machine, buffer, Rows{a, pitch, rows, pitch}, row, first);
  }
};

// ---- the largest logit without the logits ---------------------------------------------------------------------

constexpr int kArgmaxPanels = 4;  // 64 columns: two words of a mask
constexpr Candidate kNone{-std::numeric_limits<float>::infinity(), -1};

struct ArgmaxStep final : Step {
  int x;
  const Matrix* head;
  std::vector<Pointwise> then;
  ArgmaxStep(int x, const Matrix* head, std::vector<Pointwise> then) : x(x), head(head), then(std::move(then)) {}
  std::string kind() const override { return "argmax"; }
  int num_groups() const { return (panels_of(*head) + kArgmaxPanels - 1) / kArgmaxPanels; }
  int num_units(const Machine& machine) const override {
    return num_groups() * ((machine.num_rows + kRowsPerUnit - 1) / kRowsPerUnit);
  }
  void run(Machine& machine, int unit, int thread) const override {
    const int row_units = (machine.num_rows + kRowsPerUnit - 1) / kRowsPerUnit;
    const int row = unit % row_units * kRowsPerUnit, group = unit / row_units;
    const int rows = std::min(kRowsPerUnit, machine.num_rows - row), panel = group * kArgmaxPanels;
    const int panels = std::min(kArgmaxPanels, panels_of(*head) - panel);
    const int first = panel * kLanes, count = std::min(panels * kLanes, head->rows - first);
    float* tile = machine.scratch(thread);
    const bool needed = any_allowed(machine, row, rows, first, count);
    if (needed) {
      machine.kernels.linear(*head, input_of(machine.buffer(x), *head), row, rows, panel, panels,
                             {tile, panels * kLanes, false});
    }
    for (int r = 0; r < rows; ++r) {
      Candidate& found = machine.candidates[static_cast<size_t>(row + r) * num_groups() + group];
      found = kNone;
      if (!needed) continue;
      float* y = tile + r * panels * kLanes;
      for (const Pointwise& what : then) apply(machine, what, y, first, count);
      const uint32_t* mask = mask_of(machine, row + r);
      const int id = machine.kernels.argmax(y, count, mask ? mask + first / 32 : nullptr,
                                            &found.value);
      found.id = id < 0 ? -1 : first + id;
    }
  }
  static const uint32_t* mask_of(const Machine& machine, int row) {
    return machine.masks.empty() ? nullptr : machine.masks[row];
  }
  // Weights of columns that no row may take need not be read.
  static bool any_allowed(const Machine& machine, int row, int rows, int first, int count) {
    for (int r = row; r < row + rows; ++r) {
      const uint32_t* mask = mask_of(machine, r);
      if (!mask) return true;
      for (int word = first / 32; word <= (first + count - 1) / 32; ++word)
        if (mask[word]) return true;
    }
    return false;
  }
};

}  // namespace

Candidate best(const Machine& machine, int row) {
  const size_t groups = machine.candidates.size() / machine.num_rows;
  Candidate winner = kNone;
  for (size_t g = 0; g < groups; ++g) {
    const Candidate& c = machine.candidates[row * groups + g];
    if (c.id < 0) continue;
    if (std::isnan(c.value)) return c;
    if (winner.id < 0 || c.value > winner.value) winner = c;
  }
  return winner;
}

std::unique_ptr<Step> embedding_step(int out, const Matrix* m) { return rows_step<EmbeddingOp>(out, m); }
std::unique_ptr<Step> add_position_step(int out, const Matrix* m) { return rows_step<AddPositionOp>(out, m); }
std::unique_ptr<Step> norm_step(int out, int x, const float* weight, float eps) {
  return rows_step<NormOp>(out, x, weight, nullptr, eps);
}
std::unique_ptr<Step> layer_norm_step(int out, int x, const float* weight, const float* bias, float eps) {
  return rows_step<NormOp>(out, x, weight, bias, eps);
}
std::unique_ptr<Step> head_norm_step(int x, int first, int num_heads, const float* weight, int head_size, float eps) {
  return rows_step<HeadNormOp>(x, first, num_heads, weight, head_size, eps);
}
std::unique_ptr<Step> linear_step(int out, int x, std::vector<Part> parts, std::vector<Pointwise> then, Into into) {
  return std::make_unique<LinearStep>(out, x, std::move(parts), std::move(then), into);
}
std::unique_ptr<Step> gated_step(int out, int x, const Matrix* gate, const Matrix* up, const float* bias,
                                 Activation activation) {
  return std::make_unique<GatedStep>(out, x, gate, up, bias, activation);
}
std::unique_ptr<Step> argmax_step(int x, const Matrix* head, std::vector<Pointwise> then) {
  return std::make_unique<ArgmaxStep>(x, head, std::move(then));
}
std::unique_ptr<Step> add_step(int out, int x) { return rows_step<AddOp>(out, x); }
std::unique_ptr<Step> pointwise_step(int out, int x, Pointwise what) { return rows_step<PointwiseOp>(out, x, what); }
std::unique_ptr<Step> scale_rows_step(int out, int x) { return rows_step<ScaleRowsOp>(out, x); }
std::unique_ptr<Step> gate_step(int out, int x, Activation a) { return rows_step<GateOp>(out, x, a); }
std::unique_ptr<Step> encode_step(int x) { return rows_step<EncodeOp>(x); }
std::unique_ptr<Step> angles_step(int rope) { return rows_step<AnglesOp>(rope); }
std::unique_ptr<Step> rope_step(int x, int rope, int num_heads, int head_size, bool interleaved) {
  return rows_step<RopeOp>(x, rope, num_heads, head_size, interleaved);
}
std::unique_ptr<Step> write_kv_step(int qkv, int layer, int plan, int q_width) {
  return rows_step<WriteKVOp>(qkv, layer, plan, q_width);
}
std::unique_ptr<Step> attention_step(int out, int qkv, int layer, int plan) {
  return std::make_unique<AttentionStep>(out, qkv, layer, plan);
}

}  // namespace mainspring
