#!/usr/bin/env bash
# repair.sh WHEEL DIRECTORY: names in the wheel's tag the oldest glibc that it loads with, and refuses what would not
# load beside every torch. `make wheel`, `make wheel-aarch64` and the release (cibuildwheel) all call it.
set -euo pipefail
wheel=$1 directory=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# torch brings its libraries: they stay out of the wheel
auditwheel repair --wheel-dir "$directory" --exclude libtorch.so --exclude libtorch_cpu.so --exclude libc10.so "$wheel"

python -m zipfile -e "$wheel" "$folder"
library=$folder/torch_paged_attn/_C.abi3.so
# setup.py goes on without it where no C compiler can build it; a release has it
[ -f "$folder/torch_paged_attn/_launch.abi3.so" ] || { echo "_launch.abi3.so is missing" >&2; exit 1; }
torch-abi-audit --check torch "$library"
# auditwheel knows versions of symbols; what has none is found in whichever library is there, and has to be torch's
if nm --dynamic --undefined-only "$library" | grep ' U ' | grep -v @ | grep -Ev ' (aoti_)?torch_'; then
  echo "no library is named from which these symbols come" >&2
  exit 1
fi
