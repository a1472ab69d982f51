// The Python face: one extension module, each part of which binds its own.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

// Of what is bound here, counted up when a call changes: the Python side asks for the one that it was written for.
constexpr int kApiVersion = 6;

void bind_linear(nb::module_&);
void bind_rows(nb::module_&);
void bind_attention(nb::module_&);
void bind_sampling(nb::module_&);
void bind_program(nb::module_&);

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);
  m.attr("API_VERSION") = kApiVersion;
  bind_rows(m);
  bind_program(m);
  bind_linear(m);
  bind_attention(m);
  bind_sampling(m);
}
