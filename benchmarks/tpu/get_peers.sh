#!/usr/bin/env bash
# Brings vLLM's ragged paged attention v3 for TPU into .peer/, which git ignores (2 MB): pure JAX.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
[ -e .peer/tpu_inference ] && exit
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"$python" -m pip download --quiet --no-deps --dest "$tmp" tpu-inference==0.32.0
mkdir -p .peer
"$python" - "$tmp"/tpu_inference-*.whl .peer <<'PY'
import sys, zipfile
wheel, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        if name.startswith("tpu_inference/kernels/ragged_paged_attention/v3/"):
            archive.extract(name, target)
PY
echo "RPA v3 is in .peer/tpu_inference"
