// Machines and programs for Python. Python owns weights and decides what is recorded; nothing here decides.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "cpu.h"
#include "pack.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mainspring;

namespace {

template <typename T, typename... Shape>
using Array = nb::ndarray<const T, Shape..., nb::c_contig, nb::device::cpu>;
using Vector32 = Array<int32_t, nb::ndim<1>>;
using Vector64 = Array<int64_t, nb::ndim<1>>;
using Table = Array<int32_t, nb::ndim<2>>;
using Rows = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;

std::vector<std::string> runnable_variants() {
  std::vector<std::string> names;
  for (const Kernels* variant : all_variants())
    if (can_run(*variant)) names.push_back(variant->name);
  return names;
}

// layers: (tensor, KV heads, head size); a tensor is num_blocks * block_bytes long.
void allocate_kv(Machine& machine, int64_t num_blocks, int block_size, int64_t block_bytes, int num_tensors,
                 const std::vector<std::tuple<int, int, int>>& layers, int form) {
  if (static_cast<KVForm>(form) == KVForm::BF16 && !has_bf16(machine.kernels))
    throw std::invalid_argument("K and V in bf16 on a processor without products of them");
  std::vector<std::unique_ptr<Memory>> memory;
  for (int i = 0; i < num_tensors; ++i) memory.push_back(std::make_unique<Memory>(num_blocks * block_bytes));
  std::vector<KVCache> caches;
  for (const auto& [tensor, num_kv_heads, head_size] : layers) {
    caches.push_back({memory[tensor]->data(), block_bytes, static_cast<KVForm>(form), block_size, num_kv_heads,
                      head_size});
  }
  machine.allocate_kv(std::move(caches), std::move(memory));
}

void release_kv(Machine& machine) { machine.allocate_kv({}, {}); }

void want(Machine& machine, int buffer, bool rows, bool encoded, bool rounded) {
  if (rounded && !has_bf16(machine.kernels))
    throw std::invalid_argument("rows rounded to bf16 on a processor without products of them");
  machine.want(buffer, rows, encoded, rounded);
}

Rows buffer_rows(Machine& machine, int id) {
  Buffer& buffer = machine.buffer(id);
  if (!buffer.rows) throw std::invalid_argument("this buffer holds no floats");
  nb::capsule owner(new std::shared_ptr<Memory>(buffer.memory),
                    [](void* p) noexcept { delete static_cast<std::shared_ptr<Memory>*>(p); });
  return Rows(buffer.rows, {static_cast<size_t>(machine.num_rows), static_cast<size_t>(buffer.width)}, owner);
}

void run_batch(Program& program, const Vector32& token_ids, const Vector32& positions, const Vector32& starts,
               const Vector32& seq_lens, const std::vector<Table>& tables, const std::vector<Vector64>& slots) {
  Machine& machine = program.machine();
  machine.tables.clear();
  for (size_t g = 0; g < tables.size(); ++g) {
    machine.tables.push_back({tables[g].data(), static_cast<int32_t>(tables[g].shape(1)), slots[g].data()});
  }
  const auto num_tokens = static_cast<int32_t>(token_ids.shape(0));
  machine.batch = {static_cast<int32_t>(seq_lens.shape(0)), num_tokens,    token_ids.data(), positions.data(),
                   starts.data(),                           seq_lens.data()};
  nb::gil_scoped_release released;
  machine.reserve(num_tokens);
  machine.num_rows = num_tokens;
  program.run();
}

void put_rows(Machine& machine, int buffer, const Array<float, nb::ndim<2>>& rows) {
  const auto count = static_cast<int>(rows.shape(0));
  machine.batch = {};
  machine.reserve(count);
  machine.num_rows = count;
  std::copy_n(rows.data(), rows.size(), machine.buffer(buffer).rows);
}

void run_rows(Program& program, int buffer, const Array<float, nb::ndim<2>>& rows) {
  nb::gil_scoped_release released;
  put_rows(program.machine(), buffer, rows);
  program.run();
}

using Ids = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>, nb::c_contig>;
using Values = nb::ndarray<nb::numpy, float, nb::ndim<1>, nb::c_contig>;

// The head's program ends in `argmax`, over `num_columns` columns. masks[row]: words, or None.
std::tuple<nb::object, nb::object> run_argmax(Program& program, int buffer, const Array<float, nb::ndim<2>>& rows,
                                              int num_columns, const nb::list& masks) {
  Machine& machine = program.machine();
  const size_t count = rows.shape(0);
  auto* ids = new int32_t[count];
  nb::capsule ids_owner(ids, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
  auto* values = new float[count];
  nb::capsule values_owner(values, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  machine.masks.clear();
  for (nb::handle mask : masks) {
    const uint32_t* words = nullptr;
    if (!mask.is_none()) {
      const auto array = nb::cast<Array<int32_t, nb::ndim<1>>>(mask);
      if (array.shape(0) * 32 < static_cast<size_t>(num_columns)) throw std::invalid_argument("a mask is too short");
      words = reinterpret_cast<const uint32_t*>(array.data());
    }
    machine.masks.push_back(words);
  }
  if (!machine.masks.empty() && machine.masks.size() != count) throw std::invalid_argument("masks for other rows");
  {
    nb::gil_scoped_release released;
    const int columns_of_unit = 64;
    machine.candidates.resize(count * ((num_columns + columns_of_unit - 1) / columns_of_unit));
    put_rows(machine, buffer, rows);
    program.run();
    for (size_t row = 0; row < count; ++row) {
      const Candidate winner = best(machine, static_cast<int>(row));
      ids[row] = winner.id;
      values[row] = winner.value;
    }
    machine.masks.clear();
  }
  return {nb::cast(Ids(ids, {count}, ids_owner)), nb::cast(Values(values, {count}, values_owner))};
}

using Vector = Array<float, nb::ndim<1>>;

void linear(Program& program, int out, int x, const std::vector<std::tuple<PackedMatrix*, int>>& parts,
            std::vector<Pointwise> then, bool add) {
  std::vector<Part> views;
  for (const auto& [matrix, column] : parts) views.push_back({&matrix->view(), column});
  program.append(linear_step(out, x, std::move(views), std::move(then), add ? Into::Add : Into::Store));
}

void experts(Program& program, int out, int x, int scores, std::tuple<int, int, int> buffers,
             const std::vector<std::tuple<PackedMatrix*, PackedMatrix*, PackedMatrix*>>& matrices,
             const std::optional<Vector>& correction, std::tuple<int, int, int> counts, bool is_sigmoid,
             bool is_normalised, float scale, Activation activation) {
  if (matrices.empty()) throw std::invalid_argument("no experts");
  const auto [gathered, inner, parts] = buffers;
  const auto [num_experts, top_k, first] = counts;
  std::vector<Expert> views;
  for (const auto& [gate, up, down] : matrices) views.push_back({&gate->view(), &up->view(), &down->view()});
  append_experts(program, out, x, scores, {gathered, inner, parts}, std::move(views),
                 {num_experts, top_k, first, is_sigmoid, is_normalised, scale, activation,
                  correction ? correction->data() : nullptr});
}

Pointwise bias_of(const Vector& bias) { return {Pointwise::Kind::Bias, bias.data()}; }
Pointwise multiply_by(float factor) { return {Pointwise::Kind::Multiply, nullptr, factor}; }
Pointwise soft_cap_of(float cap) { return {Pointwise::Kind::SoftCap, nullptr, cap}; }
Pointwise activate_by(Activation activation) { return {Pointwise::Kind::Activate, nullptr, 0.0f, activation}; }

std::vector<std::tuple<std::string, double>> times(const Program& program) {
  std::vector<std::tuple<std::string, double>> found;
  for (const StepTime& step : program.times()) found.emplace_back(step.kind, 1e-9 * static_cast<double>(step.taken_ns));
  return found;
}

int attention_plan(Machine& machine, int group, int num_heads, int num_kv_heads, int head_size, float scale,
                   int window, float soft_cap, bool causal) {
  return machine.attention_plan({group, {num_heads, num_kv_heads, head_size, scale, window, soft_cap, causal}});
}

}  // namespace

void bind_program(nb::module_& m) {
  m.def("runnable_variants", &runnable_variants, "Instruction-set variants this processor can run, slowest first.");
  m.def(
      "measure_variant", [](const std::string& name) { return measure(variant_named(name)); }, "variant"_a,
      "GOP/s of a small product, by some milliseconds of one thread.");
  m.def(
      "has_bf16", [](const std::string& name) { return has_bf16(variant_named(name)); }, "variant"_a,
      "Whether products of pairs of bf16 are to be had: a matter of the variant and of this processor.");
  m.def(
      "bf16_pays", [](const std::string& name) { return bf16_pays(variant_named(name)); }, "variant"_a,
      "Whether they are the faster ones, by a millisecond of one thread.");
  m.def("num_usable_cpus", &num_usable_cpus, "proc"_a = "/proc", "cgroups"_a = "/sys/fs/cgroup",
        "CPUs of the affinity mask, limited by the quotas of control groups.");

  nb::class_<Pool>(m, "Pool").def(nb::init<int>(), "num_threads"_a).def_prop_ro("num_threads", &Pool::num_threads);

  nb::class_<Machine>(m, "Machine")
      .def(
          "__init__",
          [](Machine* self, std::shared_ptr<Pool> pool, const std::string& variant, bool int16) {
            new (self) Machine(std::move(pool), variant_named(variant), int16);
          },
          "pool"_a, "variant"_a, "int16"_a)
      .def("add_buffer", &Machine::add_buffer, "width"_a, "copies"_a = 1)
      .def("want", &want, "buffer"_a, "rows"_a, "encoded"_a, "rounded"_a)
      .def("reserve", &Machine::reserve, "num_rows"_a)
      .def("add_rope", &Machine::add_rope, "frequencies"_a, "amplitude"_a)
      .def("attention_plan", &attention_plan, "group"_a, "num_heads"_a, "num_kv_heads"_a, "head_size"_a, "scale"_a,
           "window"_a, "soft_cap"_a, "causal"_a)
      .def("allocate_kv", &allocate_kv, "num_blocks"_a, "block_size"_a, "block_bytes"_a, "num_tensors"_a, "layers"_a,
           "form"_a)
      .def("release_kv", &release_kv)
      .def("rows", &buffer_rows, "buffer"_a, "A view of the rows of the last pass.");

  nb::class_<Pointwise>(m, "Pointwise", "Something that is done to every element of a row.")
      .def_static("bias", &bias_of, "bias"_a, nb::keep_alive<0, 1>())
      .def_static("multiply", &multiply_by, "factor"_a)
      .def_static("soft_cap", &soft_cap_of, "cap"_a)
      .def_static("activate", &activate_by, "activation"_a);

  nb::class_<Program>(m, "Program")
      .def(nb::init<std::shared_ptr<Machine>>(), "machine"_a)
      .def(
          "embedding", [](Program& p, int out, const PackedMatrix& w) { p.append(embedding_step(out, &w.view())); },
          "out"_a, "weight"_a, nb::keep_alive<1, 3>())
      .def(
          "add_position",
          [](Program& p, int out, const PackedMatrix& w) { p.append(add_position_step(out, &w.view())); }, "out"_a,
          "weight"_a, nb::keep_alive<1, 3>())
      .def(
          "rms_norm",
          [](Program& p, int out, int x, const Vector& w, float eps) {
            p.append(norm_step(out, x, w.data(), eps));
          },
          "out"_a, "x"_a, "weight"_a, "eps"_a, nb::keep_alive<1, 4>())
      .def(
          "layer_norm",
          [](Program& p, int out, int x, const Vector& w, const Vector& b, float eps) {
            p.append(layer_norm_step(out, x, w.data(), b.data(), eps));
          },
          "out"_a, "x"_a, "weight"_a, "bias"_a, "eps"_a, nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def(
          "head_norm",
          [](Program& p, int x, int first, int num_heads, const Vector& w, float eps) {
            p.append(head_norm_step(x, first, num_heads, w.data(), static_cast<int>(w.shape(0)), eps));
          },
          "x"_a, "first"_a, "num_heads"_a, "weight"_a, "eps"_a, nb::keep_alive<1, 5>())
      .def("linear", &linear, "out"_a, "x"_a, "parts"_a, "then"_a, "add"_a, nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>())
      .def(
          "gated",
          [](Program& p, int out, int x, const PackedMatrix& gate, const PackedMatrix& up,
             const std::optional<Vector>& bias, Activation activation) {
            p.append(gated_step(out, x, &gate.view(), &up.view(), bias ? bias->data() : nullptr, activation));
          },
          "out"_a, "x"_a, "gate"_a, "up"_a, "bias"_a.none(), "activation"_a, nb::keep_alive<1, 4>(),
          nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>())
      .def(
          "argmax",
          [](Program& p, int x, const PackedMatrix& w, std::vector<Pointwise> then) {
            p.append(argmax_step(x, &w.view(), std::move(then)));
          },
          "x"_a, "weight"_a, "then"_a, nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def("add", [](Program& p, int out, int x) { p.append(add_step(out, x)); }, "out"_a, "x"_a)
      .def(
          "pointwise", [](Program& p, int out, int x, const Pointwise& what) { p.append(pointwise_step(out, x, what)); },
          "out"_a, "x"_a, "what"_a, nb::keep_alive<1, 4>())
      .def(
          "gate", [](Program& p, int out, int x, Activation activation) { p.append(gate_step(out, x, activation)); },
          "out"_a, "x"_a, "activation"_a)
      .def(
          "scale_rows", [](Program& p, int out, int x) { p.append(scale_rows_step(out, x)); }, "out"_a, "x"_a)
      .def("experts", &experts, "out"_a, "x"_a, "scores"_a, "buffers"_a, "experts"_a, "correction"_a.none(), "counts"_a,
           "is_sigmoid"_a, "is_normalised"_a, "scale"_a, "activation"_a, nb::keep_alive<1, 6>(),
           nb::keep_alive<1, 7>(),
           "buffers: gathered, inner, parts; experts: gate, up, down; counts: all experts, chosen, the first here.")
      .def("encode", [](Program& p, int x) { p.append(encode_step(x)); }, "x"_a)
      .def("angles", [](Program& p, int rope) { p.append(angles_step(rope)); }, "rope"_a)
      .def(
          "rope",
          [](Program& p, int x, int rope, int num_heads, int head_size, bool interleaved) {
            p.append(rope_step(x, rope, num_heads, head_size, interleaved));
          },
          "x"_a, "rope"_a, "num_heads"_a, "head_size"_a, "interleaved"_a)
      .def(
          "write_kv",
          [](Program& p, int qkv, int layer, int plan, int q_width) {
            p.append(write_kv_step(qkv, layer, plan, q_width));
          },
          "qkv"_a, "layer"_a, "plan"_a, "q_width"_a)
      .def(
          "attention",
          [](Program& p, int out, int qkv, int layer, int plan) { p.append(attention_step(out, qkv, layer, plan)); },
          "out"_a, "qkv"_a, "layer"_a, "plan"_a)
      .def(
          "outside",
          [](Program& p, nb::callable call) {
            p.append_outside([call = std::move(call)] {
              nb::gil_scoped_acquire held;
              call();
            });
          },
          "call"_a, "Call this between steps, on any thread, with the interpreter's lock.")
      .def("keep_times", &Program::keep_times, "keep"_a)
      .def("times", &times, "(kind, seconds of processor time) of every step of the last pass.")
      .def("run_batch", &run_batch, "token_ids"_a, "positions"_a, "query_start_loc"_a, "seq_lens"_a,
           "block_tables"_a, "slot_mapping"_a)
      .def("run_rows", &run_rows, "buffer"_a, "rows"_a)
      .def("run_argmax", &run_argmax, "buffer"_a, "rows"_a, "num_columns"_a, "masks"_a);
}
