// Entries by which tests call the kernels of single rows one by one.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "cpu.h"
#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mainspring;

namespace {

using In = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using InOut = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Heads = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool right, const char* what) {
  if (!right) throw std::invalid_argument(what);
}

// The length of all of them.
template <typename First, typename... Rest>
int length(const First& first, const Rest&... rest) {
  require(((rest.size() == first.size()) && ...), "rows of different lengths");
  return static_cast<int>(first.size());
}

void rms_norm(const std::string& variant, In x, In weight, float eps, InOut out) {
  const int count = length(x, weight, out);
  variant_named(variant).rms_norm(x.data(), weight.data(), eps, count, out.data());
}

void layer_norm(const std::string& variant, In x, In weight, In bias, float eps, InOut out) {
  const int count = length(x, weight, bias, out);
  variant_named(variant).layer_norm(x.data(), weight.data(), bias.data(), eps, count, out.data());
}

void add(const std::string& variant, InOut out, In x) {
  const int count = length(out, x);
  variant_named(variant).add(out.data(), x.data(), count);
}

void multiply(const std::string& variant, InOut x, float factor) {
  variant_named(variant).multiply(x.data(), factor, length(x));
}

void soft_cap(const std::string& variant, InOut x, float cap) {
  variant_named(variant).soft_cap(x.data(), cap, length(x));
}

void activate(const std::string& variant, Activation activation, In x, InOut out) {
  const int count = length(x, out);
  variant_named(variant).activate(activation, x.data(), count, out.data());
}

void gate(const std::string& variant, Activation activation, In x, In up, InOut out) {
  const int count = length(x, up, out);
  variant_named(variant).gate(activation, x.data(), up.data(), count, out.data());
}

void rope(const std::string& variant, Heads heads, In cosines, In sines, bool interleaved) {
  require(cosines.size() == sines.size() && 2 * cosines.size() <= heads.shape(1), "angles for longer heads");
  variant_named(variant).rope(heads.data(), cosines.data(), sines.data(), static_cast<int>(cosines.size()),
                              static_cast<int>(heads.shape(0)), static_cast<int>(heads.shape(1)), interleaved);
}

}  // namespace

void bind_rows(nb::module_& m) {
  nb::enum_<Activation>(m, "Activation")
      .value("silu", Activation::Silu)
      .value("gelu", Activation::Gelu)
      .value("gelu_tanh", Activation::GeluTanh);
  m.def("rms_norm", &rms_norm, "variant"_a, "x"_a, "weight"_a, "eps"_a, "out"_a);
  m.def("layer_norm", &layer_norm, "variant"_a, "x"_a, "weight"_a, "bias"_a, "eps"_a, "out"_a);
  m.def("add", &add, "variant"_a, "out"_a, "x"_a);
  m.def("multiply", &multiply, "variant"_a, "x"_a, "factor"_a);
  m.def("soft_cap", &soft_cap, "variant"_a, "x"_a, "cap"_a);
  m.def("activate", &activate, "variant"_a, "activation"_a, "x"_a, "out"_a);
  m.def("gate", &gate, "variant"_a, "activation"_a, "x"_a, "up"_a, "out"_a);
  m.def("rope", &rope, "variant"_a, "heads"_a, "cosines"_a, "sines"_a, "interleaved"_a);
}
