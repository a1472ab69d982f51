#include <nanobind/nanobind.h>

void bind_linear(nanobind::module_&) {}
