// Sampling for Python: what a request wishes is made ready once, as a `RowPlan`; a step's rows are one call.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "cpu.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mainspring;

namespace {

template <typename T, int kDimensions>
using Array = nb::ndarray<const T, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;
using Ids = Array<int64_t, 1>;
using Floats = Array<float, 1>;
using Logits = Array<float, 2>;

template <typename T>
struct NewArray {  // T[rows][columns], or [rows] where columns is 0
  T* data;
  nb::object object;

  NewArray(size_t rows, size_t columns)
      : data(new T[std::max<size_t>(1, rows * std::max<size_t>(1, columns))]) {
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    const size_t shape[2] = {rows, columns};
    object = nb::cast(nb::ndarray<nb::numpy, T>(data, columns ? 2 : 1, shape, owner));
  }
};

// Ids that the kernels may use as indices.
std::vector<int64_t> checked(const Ids& ids, int vocab_size) {
  std::vector<int64_t> copy(ids.data(), ids.data() + ids.size());
  for (int64_t id : copy)
    if (id < 0 || id >= vocab_size) throw std::invalid_argument("a token id outside of the vocabulary");
  return copy;
}

// A request's wishes. What changes from step to step is set before the step: `count`, `forbid`.
class RowPlan {
 public:
  explicit RowPlan(int vocab_size) : vocab_size_(vocab_size) {
    request_.repetition = 1;
    request_.top_p = 1;
    request_.num_logprobs = -1;
  }

  void draw(double temperature, int64_t top_k, double top_p, double min_p, int64_t seed) {
    request_.temperature = static_cast<float>(temperature);
    request_.top_k = static_cast<int32_t>(std::min<int64_t>(top_k, vocab_size_));
    request_.top_p = top_p;
    request_.min_p = min_p;
    request_.seed = seed;
  }
  void logprobs(int num_logprobs) {
    request_.num_logprobs = num_logprobs == -1 ? vocab_size_ : std::min(num_logprobs, vocab_size_);
  }
  void allow(const Ids& ids) {
    allowed_ = checked(ids, vocab_size_);
    allowed_.reserve(1);  // an empty list allows nothing, which is not the same as no list
    request_.allowed_ids = allowed_.data();
    request_.num_allowed = static_cast<int32_t>(allowed_.size());
  }
  void bias(const Ids& ids, const Floats& bias) {
    if (ids.size() != bias.size()) throw std::invalid_argument("as many biases as ids are needed");
    bias_ids_ = checked(ids, vocab_size_);
    bias_.assign(bias.data(), bias.data() + bias.size());
    request_.bias_ids = bias_ids_.data();
    request_.bias = bias_.data();
    request_.num_biased = static_cast<int32_t>(bias_.size());
  }
  void stop_from(const Ids& ids, int64_t position) {
    stop_ids_ = checked(ids, vocab_size_);
    request_.stop_ids = stop_ids_.data();
    stops_from_ = position;
  }
  void penalties(double repetition, double frequency, double presence) {
    request_.repetition = static_cast<float>(repetition);
    request_.frequency = static_cast<float>(frequency);
    request_.presence = presence;
  }
  // Views: they are read at the next `sample_rows`.
  void count(Ids ids, Floats counts) {
    if (ids.size() != counts.size()) throw std::invalid_argument("as many counts as ids are needed");
    for (size_t i = 0; i < ids.size(); ++i)
      if (ids.data()[i] < 0 || ids.data()[i] >= vocab_size_)
        throw std::invalid_argument("a token id outside of the vocabulary");
    request_.counted_ids = ids.data();
    request_.counts = counts.data();
    request_.num_counted = static_cast<int32_t>(ids.size());
    counted_ = std::move(ids);
    counts_ = std::move(counts);
  }
  void forbid(const Ids& ids) {
    forbidden_ = checked(ids, vocab_size_);
    request_.forbidden_ids = forbidden_.data();
    request_.num_forbidden = static_cast<int32_t>(forbidden_.size());
  }

  RowRequest request(int64_t position, const uint32_t* mask) const {
    RowRequest request = request_;
    request.position = position;
    request.mask = mask;
    request.num_stops = position < stops_from_ ? static_cast<int32_t>(stop_ids_.size()) : 0;
    return request;
  }
  int vocab_size() const { return vocab_size_; }

 private:
  int vocab_size_;
  RowRequest request_{};
  int64_t stops_from_ = 0;
  std::vector<int64_t> allowed_, bias_ids_, stop_ids_, forbidden_;
  std::vector<float> bias_;
  Ids counted_;
  Floats counts_;
};

// A pass of one step, whose units are rows.
template <typename F>
class RowsPass final : public Pass {
 public:
  RowsPass(int num_rows, F row) : num_rows_(num_rows), row_(row) {}
  int num_steps() const override { return 1; }
  int num_units(int) const override { return num_rows_; }
  void run(int, int unit, int thread) override { row_(unit, thread); }

 private:
  int num_rows_;
  F row_;
};

class Sampler {
 public:
  Sampler(std::shared_ptr<Pool> pool, const std::string& variant, int vocab_size)
      : kernels_(variant_named(variant)),
        pool_(std::move(pool)),
        vocab_size_(vocab_size),
        scratch_size_(kSamplingArrays * (int64_t{vocab_size} + kSamplingSlack)),
        scratch_(new float[scratch_size_ * pool_->num_threads()]) {}

  RowPlan plan() const { return RowPlan(vocab_size_); }

  nb::tuple sample_rows(const Logits& logits, const nb::list& plans, const Ids& positions,
                        const nb::list& masks) {
    const size_t num_rows = plans.size();
    check_rows(logits, num_rows);
    if (positions.size() != num_rows) throw std::invalid_argument("as many positions as rows are needed");
    if (masks.size() != 0 && masks.size() != num_rows) throw std::invalid_argument("masks for other rows");
    std::vector<std::vector<uint32_t>> padded;
    std::vector<RowRequest> requests;
    for (size_t row = 0; row < num_rows; ++row) {
      const auto& plan = nb::cast<const RowPlan&>(plans[row]);
      if (plan.vocab_size() != vocab_size_) throw std::invalid_argument("a plan for another vocabulary");
      requests.push_back(plan.request(positions.data()[row], mask_words(masks, row, padded)));
    }
    const NewArray<int32_t> token_ids(num_rows, 0), ranks(num_rows, 0);
    nb::dict logprobs;
    std::vector<RowResult> results(num_rows);
    for (size_t row = 0; row < num_rows; ++row) {
      const int num_logprobs = requests[row].num_logprobs;
      if (num_logprobs >= 0) logprobs[nb::int_(row)] = room_for_logprobs(num_logprobs, results[row]);
    }
    run(num_rows, [&](int row, int thread) {
      const float* row_logits = logits.data() + int64_t{row} * vocab_size_;
      kernels_.sample_row(requests[row], row_logits, vocab_size_, scratch(thread), &results[row]);
    });
    nb::list failures;
    for (size_t row = 0; row < num_rows; ++row) {
      const RowResult& result = results[row];
      const bool fine = result.status == RowStatus::Fine;
      token_ids.data[row] = fine ? result.token : -1;
      ranks.data[row] = result.rank;
      if (fine) continue;
      failures.append(nb::make_tuple(row, static_cast<int>(result.status), result.value));
      if (result.ids) nb::del(logprobs[nb::int_(row)]);
    }
    return nb::make_tuple(token_ids.object, failures, logprobs, ranks.object);
  }

  nb::tuple row_logprobs(const Logits& logits, const Array<int32_t, 1>& token_ids, int num_logprobs) {
    const size_t num_rows = token_ids.size();
    check_rows(logits, num_rows);
    const int k = num_logprobs == -1 ? vocab_size_ : std::min(num_logprobs, vocab_size_);
    const NewArray<int32_t> ids(num_rows, 1 + k), ranks(num_rows, 0);
    const NewArray<float> logprobs(num_rows, 1 + k);
    std::vector<RowResult> results(num_rows);
    for (size_t row = 0; row < num_rows; ++row) {
      if (token_ids.data()[row] < 0 || token_ids.data()[row] >= vocab_size_)
        throw std::invalid_argument("a token id outside of the vocabulary");
      results[row].ids = ids.data + row * (1 + k);
      results[row].logprobs = logprobs.data + row * (1 + k);
    }
    run(num_rows, [&](int row, int thread) {
      const float* row_logits = logits.data() + int64_t{row} * vocab_size_;
      const int token = token_ids.data()[row];
      kernels_.row_logprobs(row_logits, vocab_size_, token, k, scratch(thread), &results[row]);
    });
    nb::list failures;
    for (size_t row = 0; row < num_rows; ++row) {
      const RowResult& result = results[row];
      if (result.status == RowStatus::Fine)
        ranks.data[row] = result.rank;
      else
        failures.append(nb::make_tuple(row, static_cast<int>(result.status), result.value));
    }
    return nb::make_tuple(ids.object, logprobs.object, ranks.object, failures);
  }

 private:
  void check_rows(const Logits& logits, size_t num_rows) const {
    if (logits.shape(0) != num_rows) throw std::invalid_argument("as many rows of logits as rows are needed");
    if (logits.shape(1) != static_cast<size_t>(vocab_size_))
      throw std::invalid_argument("logits of another vocabulary");
  }

  // The words of a row's mask, as many as the kernels read: what a short mask does not name is not allowed.
  const uint32_t* mask_words(const nb::list& masks, size_t row,
                             std::vector<std::vector<uint32_t>>& padded) const {
    if (masks.size() == 0 || masks[row].is_none()) return nullptr;
    const auto mask = nb::cast<Array<int32_t, 1>>(masks[row]);
    const auto* words = reinterpret_cast<const uint32_t*>(mask.data());
    const size_t needed = (static_cast<size_t>(vocab_size_) + 31) / 32;
    if (mask.size() >= needed) return words;  // alive as long as the list is
    padded.emplace_back(needed);
    std::copy_n(words, mask.size(), padded.back().begin());
    return padded.back().data();
  }

  nb::tuple room_for_logprobs(int num_logprobs, RowResult& result) const {
    const size_t width = 1 + num_logprobs;
    const NewArray<int32_t> ids(1, width);
    const NewArray<float> logprobs(1, width);
    result.ids = ids.data;
    result.logprobs = logprobs.data;
    return nb::make_tuple(ids.object, logprobs.object);
  }

  template <typename F>
  void run(size_t num_rows, F row) {
    RowsPass<F> pass(static_cast<int>(num_rows), row);
    nb::gil_scoped_release released;
    pool_->run(pass);
  }

  float* scratch(int thread) { return scratch_.get() + thread * scratch_size_; }

  const Kernels& kernels_;
  std::shared_ptr<Pool> pool_;
  int vocab_size_;
  int64_t scratch_size_;  // floats, of a thread
  std::unique_ptr<float[]> scratch_;
};

std::tuple<int, float> argmax(const std::string& variant, const Floats& row,
                              const std::optional<Array<int32_t, 1>>& mask) {
  if (mask && mask->size() * 32 < row.size()) throw std::invalid_argument("the mask is too short");
  const auto* words = mask ? reinterpret_cast<const uint32_t*>(mask->data()) : nullptr;
  float value;
  const int index = variant_named(variant).argmax(row.data(), static_cast<int>(row.size()), words, &value);
  return {index, value};
}

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::class_<RowPlan>(m, "RowPlan", "What one request asks of each of its rows; at first, the best token.")
      .def("draw", &RowPlan::draw, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a)
      .def("logprobs", &RowPlan::logprobs, "num_logprobs"_a, "-1: of the whole vocabulary.")
      .def("allow", &RowPlan::allow, "ids"_a, "All others are forbidden.")
      .def("bias", &RowPlan::bias, "ids"_a, "bias"_a)
      .def("stop_from", &RowPlan::stop_from, "ids"_a, "position"_a, "Forbidden before that position.")
      .def("penalties", &RowPlan::penalties, "repetition"_a, "frequency"_a, "presence"_a)
      .def("count", &RowPlan::count, "ids"_a, "counts"_a,
           "Whom the penalties meet. Views, read by the next `sample_rows`.")
      .def("forbid", &RowPlan::forbid, "ids"_a);

  nb::class_<Sampler>(m, "Sampler")
      .def(nb::init<std::shared_ptr<Pool>, const std::string&, int>(), "pool"_a, "variant"_a, "vocab_size"_a)
      .def("plan", &Sampler::plan)
      .def("sample_rows", &Sampler::sample_rows, "logits"_a, "plans"_a, "positions"_a, "masks"_a,
           "-> token ids [rows] int32 (-1: failed), [(row, status, value)] of those that failed,\n"
           "{row: (ids [1, 1 + k], log-probabilities)} and ranks [rows] of those that asked.\n"
           "masks: one a row, or None; or none at all.")
      .def("row_logprobs", &Sampler::row_logprobs, "logits"_a, "token_ids"_a, "num_logprobs"_a,
           "-> ids [rows, 1 + k], log-probabilities, ranks [rows], failures as above.");

  m.def("argmax", &argmax, "variant"_a, "row"_a, "mask"_a = nb::none(), "-> index, value.");
}
