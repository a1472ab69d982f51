#!/bin/sh
# Build the kernels with the address and undefined-behaviour sanitizers and run their tests under them.
#
#   native/sanitize.sh [what pytest is given, instead of tests/kernels/native]
#
# PYTHON names the interpreter (default: python), BUILD the folder to build in (default: native/build/sanitize).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
build=${BUILD:-$root/native/build/sanitize}

cmake -S "$root/native" -B "$build" -DCMAKE_BUILD_TYPE=Release -DMAINSPRING_SANITIZE=ON \
  -DPython_EXECUTABLE="$(command -v "$python")" >/dev/null
cmake --build "$build"

package=$build/python/mainspring_native
mkdir -p "$package"
cp "$root"/native/src/mainspring_native/*.py "$build"/_core*.so "$package"

# The interpreter itself is not instrumented: it loads the runtime first, and what it never frees is no leak here.
# The first error ends the run; pytest leaves standard error alone, or the report would be lost.
[ $# -gt 0 ] || set -- "$root/tests/kernels/native"
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0:strict_string_checks=1:detect_stack_use_after_return=1 \
  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
  PYTHONPATH="$build/python:$root/src" PYTHONMALLOC=malloc \
  "$python" -m pytest -q -W error -p no:cacheprovider --capture=sys "$@"
