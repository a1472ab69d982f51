// Attention and the kernels of single rows, for tests and measurements in Python. The engine reaches them
// through programs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <stdexcept>
#include <vector>

#include "attention_plan.h"
#include "cpu.h"
#include "encoded_rows.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mainspring;

namespace {

template <typename T, int kDims>
using In = nb::ndarray<const T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
template <typename T, int kDims>
using InOut = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

void require(bool right, const char* what) {
  if (!right) throw std::invalid_argument(what);
}

// One layer's cache over the caller's memory, [num_blocks][block bytes].
KVCache cache_of(const InOut<uint8_t, 2>& data, int form, int block_size, int num_kv_heads, int head_size) {
  const int64_t element_bytes = form == 0 ? 4 : form == 2 ? 1 : 2, scale_bytes = form == 2 ? 4 : 0;
  const int64_t bytes = 2 * int64_t{block_size} * num_kv_heads * (head_size * element_bytes + scale_bytes);
  require(form >= 0 && form <= 3, "no such form of K and V");
  require(static_cast<int64_t>(data.shape(1)) == bytes, "blocks of another size");
  return {data.data(), bytes, static_cast<KVForm>(form), block_size, num_kv_heads, head_size};
}

void write_kv(const std::string& variant, InOut<uint8_t, 2> data, int form, int block_size, int num_kv_heads,
              int head_size, In<float, 2> kv, In<int64_t, 1> slots) {
  const Kernels& kernels = variant_named(variant);
  const KVCache cache = cache_of(data, form, block_size, num_kv_heads, head_size);
  require(static_cast<int>(kv.shape(1)) == 2 * num_kv_heads * head_size && kv.shape(0) == slots.size(),
          "keys and values of another shape");
  const int64_t num_slots = static_cast<int64_t>(data.shape(0)) * block_size;
  for (size_t t = 0; t < slots.size(); ++t) {
    const int64_t slot = slots.data()[t];
    require(slot < num_slots, "a slot outside the cache");
    if (slot >= 0) kernels.write_kv(cache, kv.data() + t * kv.shape(1), slot);
  }
}

class AttentionPass final : public Pass {
 public:
  AttentionPass(const Kernels& kernels, const AttentionArgs& args, int num_threads)
      : kernels_(kernels), args_(args), scratch_((num_threads * kAttentionScratch + 16)) {}
  int num_steps() const override { return 1; }
  int num_units(int) const override { return mainspring::num_units(*args_.plan); }
  void run(int, int unit, int thread) override {
    const auto start = reinterpret_cast<uintptr_t>(scratch_.data());
    kernels_.attend(args_, unit,
                    reinterpret_cast<float*>((start + 63) & ~uintptr_t{63}) + thread * kAttentionScratch);
  }

 private:
  const Kernels& kernels_;
  const AttentionArgs& args_;
  std::vector<float> scratch_;
};

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// How many spans are read for a KV head: fewer where requests share them.
int num_spans_read(const AttentionPlan& plan) {
  int count = 0;
  for (int u = 0; u < plan.num_units; ++u)
    for (int j = 0; j < plan.units[u].num_jobs; ++j)
      count += plan.jobs[plan.units[u].first_job + j].num_spans;
  return count;
}

// Attention for a whole batch, `repeats` times. `out` [tokens][heads * head size], or the rows as 8-bit
// integers with their scales, or both.
nb::tuple attention(const std::string& variant, InOut<uint8_t, 2> data, int form, int block_size,
                    int num_kv_heads, int head_size, In<float, 2> q, In<int32_t, 1> starts,
                    In<int32_t, 1> seq_lens, In<int32_t, 2> table, float scale, int window, float soft_cap,
                    bool causal, int num_threads, int repeats, std::optional<InOut<float, 2>> out,
                    std::optional<InOut<int8_t, 2>> codes, std::optional<InOut<float, 2>> scales) {
  const Kernels& kernels = variant_named(variant);
  const KVCache cache = cache_of(data, form, block_size, num_kv_heads, head_size);
  require(cache.form != KVForm::BF16 || has_bf16(kernels), "this variant has no products of bf16 here");
  const auto width = static_cast<int>(q.shape(1)), num_tokens = static_cast<int>(q.shape(0));
  const auto num_requests = static_cast<int>(seq_lens.size());
  require(width % head_size == 0, "queries of another width");
  require(starts.size() == seq_lens.size() + 1 && table.shape(0) == seq_lens.size() &&
              starts.data()[num_requests] == num_tokens,
          "arrays for another batch");
  require(num_threads >= 1 && repeats >= 1, "no thread, or no pass");
  require(out || codes, "no output");
  require(!out || (out->shape(0) == q.shape(0) && out->shape(1) == q.shape(1)), "an output of another shape");
  AttentionArgs args{};
  args.q = q.data();
  args.q_stride = width;
  args.out = out ? out->data() : nullptr;
  args.cache = cache;
  args.shape = {width / head_size, num_kv_heads, head_size, scale, window, soft_cap, causal};
  std::optional<EncodedRows> encoded;
  if (codes) {
    require(width / num_kv_heads % kBlock == 0, "a KV head's rows must be whole blocks of 32 to be encoded");
    require(scales && codes->size() == q.size() && scales->size() * kBlock == q.size(),
            "codes of another shape");
    encoded.emplace(num_tokens, width, false);
    args.encoded = encoded->view();
  }
  const BatchView batch{num_requests, num_tokens, nullptr, nullptr, starts.data(), seq_lens.data()};
  const BlockTables tables{table.data(), static_cast<int32_t>(table.shape(1)), nullptr};

  nb::gil_scoped_release released;
  struct Owner {
    AttentionPlan* plan = nullptr;
    ~Owner() {
      if (plan) destroy_plan(plan);
    }
  } owner;
  double plan_s = 1e9, best_s = 1e9;
  for (int i = 0; i < repeats; ++i) {
    const double start = seconds();
    owner.plan = plan_attention(owner.plan, batch, tables, args.shape, block_size);
    plan_s = std::min(plan_s, seconds() - start);
  }
  args.plan = owner.plan;
  // What no job has left would be seen.
  std::vector<float> partials(num_partials(*owner.plan), std::numeric_limits<float>::quiet_NaN());
  args.partials = partials.data();
  Pool pool(num_threads);
  AttentionPass pass(kernels, args, num_threads);
  for (int i = 0; i < repeats; ++i) {
    rewind(*owner.plan);
    const double start = seconds();
    pool.run(pass);
    best_s = std::min(best_s, seconds() - start);
  }
  if (codes) encoded->take_apart(codes->data(), nullptr, scales->data(), nullptr);
  nb::gil_scoped_acquire acquired;
  return nb::make_tuple(plan_s, best_s, num_units(*owner.plan), num_spans_read(*owner.plan));
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("write_kv", &write_kv, "variant"_a, "cache"_a, "form"_a, "block_size"_a, "num_kv_heads"_a,
        "head_size"_a, "kv"_a, "slots"_a);
  m.def("attention", &attention, "variant"_a, "cache"_a, "form"_a, "block_size"_a, "num_kv_heads"_a,
        "head_size"_a, "q"_a, "query_start_loc"_a, "seq_lens"_a, "block_table"_a, "scale"_a, "window"_a,
        "soft_cap"_a, "causal"_a, "num_threads"_a, "repeats"_a, "out"_a.none(), "codes"_a.none(),
        "scales"_a.none(),
        "Attention over a cache in the caller's memory. Returns (seconds of a plan, seconds of the fastest "
        "pass, units, spans read for each KV head).");
}
