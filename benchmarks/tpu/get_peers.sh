#!/usr/bin/env bash
# Brings vLLM's ragged paged attention v3 and its MLA kernel for TPU into .peer/, which git ignores (2 MB): pure JAX.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
[ -e .peer/tpu_inference/kernels/mla/v2 ] && exit
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"$python" -m pip download --quiet --no-deps --dest "$tmp" tpu-inference==0.32.0
mkdir -p .peer
"$python" - "$tmp"/tpu_inference-*.whl .peer <<'PY'
import sys, zipfile
wheel, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        wanted = "ragged_paged_attention/v3/", "mla/v2/"
        if name.startswith(tuple("tpu_inference/kernels/" + folder for folder in wanted)):
            archive.extract(name, target)
PY
echo "RPA v3 and MLA are in .peer/tpu_inference"
