#!/usr/bin/env bash
# The kernels' suites with the kernels under AddressSanitizer and UndefinedBehaviorSanitizer, in a
# build of their own, on every ISA of this machine or on PAGED_ATTN_CPU_ISA. Arguments replace the
# suites. PYTHON is honoured.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=build/sanitize

export PAGED_ATTN_BUILD_CPP=1
PAGED_ATTN_EXTRA_CFLAGS="-O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1" \
  "$python" setup.py --quiet build_ext --build-lib "$out" --build-temp "$out/objects"

export PAGED_ATTN_LIBRARY="$PWD/$out/torch_paged_attn/_C.abi3.so"
list='import torch, torch_paged_attn; print(torch.ops.paged_attn.cpu_isas())'

# the interpreter is not instrumented: the runtimes come first; torch and CPython keep memory for good
cxx=${CXX:-g++}
LD_PRELOAD="$($cxx -print-file-name=libasan.so) $($cxx -print-file-name=libstdc++.so)"
export LD_PRELOAD
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1
export UBSAN_OPTIONS=print_stacktrace=1
# freed memory stays with AddressSanitizer for a while: two tests that count a process's memory fail
counts=tests/backends/test_cpu.py::test_a
[ $# -gt 0 ] || set -- tests/backends tests/properties --backend cpu \
  --deselect ${counts}_refused_call_leaves_no_memory_behind \
  --deselect ${counts}_large_call_does_not_keep_its_memory
for isa in ${PAGED_ATTN_CPU_ISA:-$("$python" -c "$list")}; do
  echo "$isa"
  # -s: what a sanitizer writes as it ends the process would be lost with what pytest captures
  PAGED_ATTN_CPU_ISA=$isa "$python" -m pytest -q -s "$@"
done
