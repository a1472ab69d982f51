// A forward pass as a list of steps, recorded once and replayed for any batch.
//
// Theory of operation.
// - A `Machine` has the threads, the kernels of one variant, buffers of rows, and the KV cache. A `Program` is a list
//   of steps over buffers; several programs (the layers, the head) share a machine.
// - A step says how many units it has for the rows at hand and computes one of them. Which thread computes which
//   unit, and how many rows or panels a unit has, has no influence on any result: kernels.h sees to that.
// - Steps that go over a buffer row by row, one after another, become one step: a row goes through all of them while it
//   is in the nearest cache.
// - A buffer holds floats, or the same rows encoded for the quantised kernels, or rounded to bf16, or several of these:
//   whoever records decides, and a step writes what is there. So neither costs a pass of its own.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "kernels.h"
#include "pool.h"

namespace mainspring {

// The largest logit of a row, or of a part of it, and its id; -inf and -1: none was allowed.
struct Candidate {
  float value;
  int32_t id;
};

// Memory that is zero until it is written, in huge pages where the system has them.
class Memory {
 public:
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_;
  size_t bytes_;
};

struct Buffer {
  int width;
  int copies = 1;  // rows for each row of a pass
  int capacity = 0;
  float* rows = nullptr;  // [capacity * copies][width]; null if no step reads floats
  Encoded encoded{};      // no records if none reads encoded rows
  Rounded rounded{};      // no rows if none reads rounded ones
  bool wants_rows = false;
  bool wants_encoded = false;
  bool wants_rounded = false;
  std::shared_ptr<Memory> memory;  // shared with views of it
};

struct AttentionKey {  // layers with equal ones share a plan
  int group;
  AttentionShape shape;
  bool operator==(const AttentionKey& other) const {
    const AttentionShape &a = shape, &b = other.shape;
    return group == other.group && a.num_heads == b.num_heads && a.num_kv_heads == b.num_kv_heads &&
           a.head_size == b.head_size && a.scale == b.scale && a.window == b.window && a.soft_cap == b.soft_cap &&
           a.causal == b.causal;
  }
};

// Which experts the rows of a pass go through, layer by layer. Rows are gathered by expert: those of one are
// neighbours, and begin with a pair.
struct Routes {
  struct Group {
    int expert;  // of those that are here
    int begin, count;  // gathered rows
  };
  int most_chosen = 0;          // by a row, in any layer
  std::vector<int> experts;     // [rows][top_k], in order of their numbers
  std::vector<float> weights;   // likewise
  std::vector<int> places;      // likewise: the gathered row; -1: the expert is not here
  std::vector<Group> groups;    // of experts that have rows
  std::vector<int> counts;      // per expert that is here

  void reserve(int num_rows) {
    const size_t wanted = static_cast<size_t>(num_rows) * most_chosen;
    if (experts.size() >= wanted) return;
    experts.resize(wanted);
    weights.resize(wanted);
    places.resize(wanted);
  }
};

class Machine {
 public:
  Machine(std::shared_ptr<Pool> pool, const Kernels& kernels, bool int16);
  ~Machine();

  int add_buffer(int width, int copies = 1);
  void want(int buffer, bool rows, bool encoded, bool rounded);
  Buffer& buffer(int id) { return buffers_[id]; }
  void reserve(int num_rows);  // so many rows in every buffer; one that grows loses what it held, views keep theirs

  int add_rope(std::vector<double> frequencies, double amplitude);
  int attention_plan(const AttentionKey&);  // its number
  void allocate_kv(std::vector<KVCache> layers, std::vector<std::unique_ptr<Memory>> memory);

  const Kernels& kernels;
  const bool int16;
  std::shared_ptr<Pool> pool;

  // Of the pass that runs.
  int num_rows = 0;
  BatchView batch{};
  std::vector<BlockTables> tables;      // per KV group
  std::vector<KVCache> kv;              // per layer
  std::vector<const uint32_t*> masks;   // per row, of `ArgmaxStep`; empty: none
  std::vector<Candidate> candidates;    // [rows][units of columns], what it found

  struct Rope {
    std::vector<double> frequencies;
    double amplitude;
    std::vector<float> cosines, sines;  // [rows][frequencies], of this pass
  };
  std::vector<Rope> ropes;
  struct Plan {
    AttentionKey key;
    AttentionPlan* plan = nullptr;
  };
  std::vector<Plan> plans;
  std::vector<float> partials;
  Routes routes;
  float* scratch(int thread) { return reinterpret_cast<float*>(scratch_->data()) + thread * kScratch; }

  static constexpr int kScratch = 128 * 1024;  // floats of a thread: attention's, or tiles of a product

 private:
  std::vector<Buffer> buffers_;
  std::vector<std::unique_ptr<Memory>> kv_memory_;
  std::unique_ptr<Memory> scratch_;
};

class Step {
 public:
  virtual ~Step() = default;
  virtual std::string kind() const = 0;  // for benchmarks
  virtual int num_units(const Machine&) const = 0;
  virtual void run(Machine&, int unit, int thread) const = 0;
  virtual bool take_over(Step&) { return false; }  // whether this step now does the work of the next one, too
};

// What the units of a step took in the last pass, of processor time of all threads together, so that a busy neighbour
// is not counted.
struct StepTime {
  std::string kind;
  int64_t taken_ns;
};

class Program {
 public:
  explicit Program(std::shared_ptr<Machine> machine) : machine_(std::move(machine)) {}
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  void append(std::unique_ptr<Step> step) {
    if (steps_.empty() || !steps_.back()->take_over(*step)) steps_.push_back(std::move(step));
  }
  // Something outside of this library that happens between steps, with all threads waiting: ranks meeting others. If it
  // throws, later ones do not happen, and `run` throws it.
  void append_outside(std::function<void()> call);
  // A pass over a batch (machine.batch and machine.tables are set), or over rows alone (num_requests is 0).
  void run();
  Machine& machine() { return *machine_; }

  void keep_times(bool keep) { keeps_times_ = keep; }  // that of a unit takes longer by two readings of a clock
  std::vector<StepTime> times() const;  // empty before a pass with times kept

 private:
  std::shared_ptr<Machine> machine_;
  std::vector<std::unique_ptr<Step>> steps_;
  bool keeps_times_ = false;
  std::vector<int64_t> taken_ns_;  // [threads][steps]
  std::exception_ptr failure_;     // of a call outside, in the pass that runs
};

struct Expert {
  const Matrix *gate, *up, *down;
};

// The constants of a layer of experts: see ExpertShape of ops.py.
struct ExpertShape {
  int num_experts, top_k;
  int first;  // the experts that are here follow it
  bool is_sigmoid, is_normalised;
  float scale;
  Activation activation;
  const float* correction;  // [num_experts]; null: none
};

// Where its steps work: rows by expert, 2 * top_k for each row of a pass.
struct ExpertBuffers {
  int gathered;  // of x
  int inner;     // what `down` reads
  int parts;     // what each expert says
};

enum class Into { Store, Add };

// A product with one stacked part of a weight: its outputs go to columns [column, column + matrix.rows).
struct Part {
  const Matrix* matrix;
  int column;
};

// Something that is done to every element of a row.
struct Pointwise {
  enum class Kind : int32_t { Bias = 0, Multiply = 1, SoftCap = 2, Activate = 3 };
  Kind kind;
  const float* bias = nullptr;  // [width of the row]
  float number = 0.0f;          // the factor, or the cap
  Activation activation{};
};

std::unique_ptr<Step> embedding_step(int out, const Matrix* matrix);
std::unique_ptr<Step> add_position_step(int out, const Matrix* matrix);
std::unique_ptr<Step> norm_step(int out, int x, const float* weight, float eps);
std::unique_ptr<Step> layer_norm_step(int out, int x, const float* weight, const float* bias, float eps);
std::unique_ptr<Step> head_norm_step(int x, int first, int num_heads, const float* weight, int head_size, float eps);
// `then` is done to the product before it is stored or added.
std::unique_ptr<Step> linear_step(int out, int x, std::vector<Part> parts, std::vector<Pointwise> then, Into into);
// activation(gate x) * (up x); bias: of gate, then of up, or null.
std::unique_ptr<Step> gated_step(int out, int x, const Matrix* gate, const Matrix* up, const float* bias, Activation);
// Leaves candidates; `best` joins them.
std::unique_ptr<Step> argmax_step(int x, const Matrix* head, std::vector<Pointwise> then);
std::unique_ptr<Step> add_step(int out, int x);
std::unique_ptr<Step> pointwise_step(int out, int x, Pointwise what);
std::unique_ptr<Step> gate_step(int out, int x, Activation);
// out *= sigmoid(x); x is one wide.
std::unique_ptr<Step> scale_rows_step(int out, int x);
// Several steps: each row's weighted sum of what its experts say (experts.cpp).
void append_experts(Program& program, int out, int x, int scores, ExpertBuffers buffers, std::vector<Expert> experts,
                    ExpertShape shape);
std::unique_ptr<Step> encode_step(int x);
std::unique_ptr<Step> angles_step(int rope);
std::unique_ptr<Step> rope_step(int x, int rope, int num_heads, int head_size, bool interleaved);
// Keeps keys and values, which follow queries of q_width.
std::unique_ptr<Step> write_kv_step(int qkv, int layer, int plan, int q_width);
std::unique_ptr<Step> attention_step(int out, int qkv, int layer, int plan);

// The result of an argmax_step for one row: the lowest id among equals.
Candidate best(const Machine& machine, int row);

}  // namespace mainspring
