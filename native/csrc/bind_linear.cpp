// Matrices for Python, and the entries by which tests and benchmarks call the matrix kernels one by one.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <vector>

#include "ceilings.h"
#include "cpu.h"
#include "encoded_rows.h"
#include "pack.h"

namespace nb = nanobind;
using namespace mainspring;

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Memory as kernels want it.
template <class T>
class Aligned {
 public:
  explicit Aligned(int64_t count)
      : data_(static_cast<T*>(
            std::aligned_alloc(64, (std::max<int64_t>(count, 1) * sizeof(T) + 63) / 64 * 64))) {
    if (!data_) throw std::bad_alloc();
  }
  ~Aligned() { std::free(data_); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  T* data() const { return data_; }

 private:
  T* data_;
};

template <class T>
nb::ndarray<nb::numpy, T> new_array(std::initializer_list<size_t> shape) {
  size_t count = 1;
  for (size_t length : shape) count *= length;
  T* data = new T[std::max<size_t>(count, 1)]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(data, shape, owner);
}

// A read-only array fits the second of these alone.
template <class Array>
void bind_memory(PackedMatrix& m, const Array& memory) {
  if (static_cast<int64_t>(memory.size()) < m.num_bytes())
    throw std::invalid_argument("memory of " + std::to_string(memory.size()) + " bytes, expected " +
                                std::to_string(m.num_bytes()));
  m.bind(memory.data());
}

void pack(PackedMatrix& m, const Bytes& raw, int64_t begin, int64_t end) {
  if (static_cast<int64_t>(raw.size()) != (end - begin) * m.row_bytes())
    throw std::invalid_argument(std::to_string(raw.size()) + " bytes for " + std::to_string(end - begin) +
                                " rows of " + std::to_string(m.row_bytes()));
  nb::gil_scoped_release unlocked;
  m.pack(raw.data(), begin, end);
}

void pack_floats(PackedMatrix& m, const Floats& values, int64_t begin, int64_t end) {
  if (static_cast<int64_t>(values.shape(0)) != end - begin ||
      static_cast<int64_t>(values.shape(1)) != m.view().columns)
    throw std::invalid_argument("values of another shape than the rows");
  nb::gil_scoped_release unlocked;
  m.pack_floats(values.data(), begin, end);
}

nb::ndarray<nb::numpy, float> unpack(const PackedMatrix& m) {
  auto out = new_array<float>({static_cast<size_t>(m.view().rows), static_cast<size_t>(m.view().columns)});
  nb::gil_scoped_release unlocked;
  m.unpack(out.data());
  return out;
}

bool is_wide(const std::string& activations) {
  if (activations == "int16") return true;
  if (activations == "int8") return false;
  throw std::invalid_argument("activations '" + activations + "', expected int8 or int16");
}

// A matrix, rows for it, and how calls are cut.
struct Product {
  Product(const PackedMatrix& m, const Floats& x, const std::string& variant, const std::string& activations)
      : kernels(variant_named(variant)), matrix(m), num_rows(static_cast<int>(x.shape(0))) {
    if (!m.is_bound()) throw std::invalid_argument("the matrix has no memory yet: bind it first");
    const int columns = m.view().columns;
    if (static_cast<int>(x.shape(1)) != columns)
      throw std::invalid_argument("x has another number of columns");
    if (m.view().scales) {
      encoded = std::make_unique<EncodedRows>(num_rows, columns, is_wide(activations));
      input.encoded = encoded->view();
      for (int row = 0; row < num_rows; ++row)
        kernels.encode({x.data() + int64_t{row} * columns, 0, 1, columns}, encoded->view(), row, 0);
    } else if (m.view().form == Form::BF16 && !is_wide(activations) && has_bf16(kernels)) {
      input.rounded.columns = columns;
      rounded.resize(num_rows * input.rounded.pitch());
      input.rounded.rows = rounded.data();
      kernels.round_to_bf16({x.data(), columns, num_rows, columns}, input.rounded, 0, 0);
    } else {
      input.rows = x.data();
    }
  }

  int num_panels() const { return (matrix.view().rows + kLanes - 1) / kLanes; }

  // Calls of at most `rows` rows and `panels` panels; `take` gets each finished tile.
  template <class Take>
  void run(int rows, int panels, float* tile, const Take& take) const {
    for (int panel = 0; panel < num_panels(); panel += panels)
      for (int row = 0; row < num_rows; row += rows) {
        const int r = std::min(rows, num_rows - row), p = std::min(panels, num_panels() - panel);
        kernels.linear(matrix.view(), input, row, r, panel, p, {tile, int64_t{p} * kLanes, false});
        take(row, r, panel, p);
      }
  }

  const Kernels& kernels;
  const PackedMatrix& matrix;
  int num_rows;
  std::unique_ptr<EncodedRows> encoded;
  std::vector<uint16_t> rounded;
  Input input{};
};

nb::ndarray<nb::numpy, float> linear(const PackedMatrix& m, const Floats& x, const std::string& variant,
                                     const std::string& activations, int cut_rows, int cut_panels) {
  if (cut_rows < 1 || cut_panels < 1)
    throw std::invalid_argument("a call takes at least one row and one panel");
  const Product product(m, x, variant, activations);
  const int64_t width = m.view().rows;
  auto out = new_array<float>({static_cast<size_t>(product.num_rows), static_cast<size_t>(width)});
  Aligned<float> tile(int64_t{cut_rows} * cut_panels * kLanes);
  nb::gil_scoped_release unlocked;
  product.run(cut_rows, cut_panels, tile.data(), [&](int row, int rows, int panel, int panels) {
    const int64_t first = int64_t{panel} * kLanes, count = std::min<int64_t>(width - first, panels * kLanes);
    for (int r = 0; r < rows; ++r)
      std::copy_n(tile.data() + int64_t{r} * panels * kLanes, count, out.data() + (row + r) * width + first);
  });
  return out;
}

// The fastest of the passes over the whole matrix that fit in `seconds`, at least two; seconds.
double time_linear(const PackedMatrix& m, const Floats& x, const std::string& variant,
                   const std::string& activations, int cut_rows, int cut_panels, double seconds) {
  const Product product(m, x, variant, activations);
  Aligned<float> tile(int64_t{cut_rows} * cut_panels * kLanes);
  nb::gil_scoped_release unlocked;
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point t) {
    return std::chrono::duration<double>(Clock::now() - t).count();
  };
  double best = 1e9;
  const auto start = Clock::now();
  for (int pass = 0; pass < 2 || since(start) < seconds; ++pass) {
    const auto begin = Clock::now();
    product.run(cut_rows, cut_panels, tile.data(), [](int, int, int, int) {});
    best = std::min(best, since(begin));
  }
  return best;
}

// Encoded rows, taken apart: high and low bytes [rows][columns], scales [rows][blocks], sums [rows][half blocks].
nb::tuple encode(const Floats& x, const std::string& variant, const std::string& activations) {
  const Kernels& kernels = variant_named(variant);
  const size_t rows = x.shape(0), columns = x.shape(1), blocks = columns / kBlock;
  if (columns % kBlock) throw std::invalid_argument("a row is encoded in whole blocks of 32");
  const bool wide = is_wide(activations);
  EncodedRows encoded(rows, columns, wide);
  const auto width = static_cast<int32_t>(columns);
  kernels.encode({x.data(), width, static_cast<int32_t>(rows), width}, encoded.view(), 0, 0);
  auto high = new_array<int8_t>({rows, columns}), low = new_array<int8_t>({rows, columns});
  auto scales = new_array<float>({rows, blocks});
  auto code_sums = new_array<int32_t>({rows, columns / kGroup});
  encoded.take_apart(high.data(), low.data(), scales.data(), code_sums.data());
  return nb::make_tuple(high, low, scales, code_sums);
}

nb::ndarray<nb::numpy, float> embed(const PackedMatrix& m, int row, const std::string& variant) {
  if (!m.is_bound()) throw std::invalid_argument("the matrix has no memory yet: bind it first");
  if (row < 0 || row >= m.view().rows) throw std::invalid_argument("the matrix has no such row");
  auto out = new_array<float>({static_cast<size_t>(m.view().columns)});
  variant_named(variant).embed(m.view(), row, out.data());
  return out;
}

nb::list measured_ceilings(const std::string& variant, int num_threads) {
  if (num_threads < 1) throw std::invalid_argument("at least one thread");
  std::vector<Ceilings> ceilings;
  {
    nb::gil_scoped_release unlocked;
    ceilings = measure_ceilings(variant_named(variant), num_threads);
  }
  nb::list found;
  for (const Ceilings& c : ceilings) {
    nb::dict entry;
    entry["num_threads"] = c.num_threads;
    entry["byte_products"] = c.byte_products;
    entry["float_products"] = c.float_products;
    entry["model_reads"] = c.model_reads;
    entry["memory_reads"] = c.memory_reads;
    found.append(entry);
  }
  return found;
}

}  // namespace

void bind_linear(nb::module_& m) {
  using namespace nb::literals;
  m.attr("LAYOUT_VERSION") = kLayoutVersion;
  nb::class_<PackedMatrix>(m, "Matrix")
      .def(nb::init<const std::string&, int64_t, int64_t>(), "source_type"_a, "rows"_a, "columns"_a)
      .def_prop_ro("form", &PackedMatrix::form_name)
      .def_prop_ro("rows", [](const PackedMatrix& self) { return self.view().rows; })
      .def_prop_ro("columns", [](const PackedMatrix& self) { return self.view().columns; })
      .def_prop_ro("num_bytes", &PackedMatrix::num_bytes)
      .def_prop_ro("row_bytes", &PackedMatrix::row_bytes)
      .def("bind", &bind_memory<WritableBytes>, "memory"_a.noconvert(), nb::keep_alive<1, 2>())
      .def("bind", &bind_memory<Bytes>, "memory"_a.noconvert(), nb::keep_alive<1, 2>())
      .def("pack", &pack, "raw"_a, "row_begin"_a, "row_end"_a)
      .def("pack_floats", &pack_floats, "values"_a, "row_begin"_a, "row_end"_a)
      .def("unpack", &unpack);
  m.def("linear", &linear, "matrix"_a, "x"_a, "variant"_a, "activations"_a = "int8", "cut_rows"_a = 64,
        "cut_panels"_a = 4);
  m.def("time_linear", &time_linear, "matrix"_a, "x"_a, "variant"_a, "activations"_a = "int8",
        "cut_rows"_a = 64, "cut_panels"_a = 4, "seconds"_a = 0.02);
  m.def("encode", &encode, "x"_a, "variant"_a, "activations"_a = "int8");
  m.def("embed", &embed, "matrix"_a, "row"_a, "variant"_a);
  m.def("measure_ceilings", &measured_ceilings, "variant"_a, "num_threads"_a);
}
