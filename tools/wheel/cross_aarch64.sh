#!/usr/bin/env bash
# cross_aarch64.sh DIRECTORY: a wheel for aarch64, compiled here by Debian's g++-aarch64-linux-gnu (or $AARCH64_CXX).
# Nothing of torch for aarch64 is needed: its headers are those of every processor, and to link against there are
# libraries of its libraries' names with the functions of its stable ABI, and nothing behind them.
# (zig's C++ library is another than torch's: an error that one throws the other does not catch.)
set -euo pipefail
cd "$(dirname "$0")/../.."
directory=$1
cxx=${AARCH64_CXX:-aarch64-linux-gnu-g++}
stubs=$PWD/build/aarch64/stubs
mkdir -p "$stubs"

libraries=$(python -c "import torch.utils.cpp_extension as c; print(c.library_paths()[0])")
nm --dynamic --defined-only "$libraries/libtorch_cpu.so" |
  awk '$2 == "T" && $3 ~ /^(aoti_)?torch_[a-z0-9_]*$/ { print "extern \"C\" void " $3 "() {}" }' > "$stubs/torch_cpu.cpp"
for name in c10 torch torch_cpu; do
  touch "$stubs/$name.cpp"
  $cxx -shared -fPIC -Wl,-soname,lib$name.so -o "$stubs/lib$name.so" "$stubs/$name.cpp"
done

export _PYTHON_HOST_PLATFORM=linux-aarch64 PAGED_ATTN_BUILD_CPP=1
# torch's own directory of libraries comes before: the linker passes over those for another processor
export CC="$cxx" CXX="$cxx" LDSHARED="$cxx -shared -L$stubs -Wl,-z,defs" LDCXXSHARED="$cxx -shared -L$stubs -Wl,-z,defs"
python -m pip wheel --quiet . --no-deps --no-build-isolation --wheel-dir "$directory"
