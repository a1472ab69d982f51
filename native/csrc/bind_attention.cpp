#include <nanobind/nanobind.h>

void bind_attention(nanobind::module_&) {}
