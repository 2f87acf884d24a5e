#!/usr/bin/env bash
# Brings vLLM's ragged paged attention v3 and its MLA kernel for TPU, and tokamax's sparse_mla, into
# .peer/, which git ignores (2 MB): pure JAX. tokamax asks for Python 3.12 and JAX 0.11; these files of
# it run with 3.11 and 0.10.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
[ -e .peer/tpu_inference/kernels/mla/v2 ] && [ -e .peer/tokamax ] && exit
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
download=("$python" -m pip download --quiet --no-deps --dest "$tmp")
"${download[@]}" tpu-inference==0.32.0
"${download[@]}" --python-version 3.12 --only-binary=:all: tokamax==0.0.17
mkdir -p .peer
"$python" - .peer "$tmp"/*.whl <<'PY'
import sys, zipfile
target, *wheels = sys.argv[1:]
kernels, ops = "tpu_inference/kernels/", "tokamax/_src/ops/"
wanted = (
    kernels + "ragged_paged_attention/v3/", kernels + "mla/v2/",
    ops + "sparse_mla/pallas_mosaic_tpu_kernel.py", ops + "csa_gather/pallas_mosaic_tpu_kernel.py",
    ops + "dsv4_compressor/csa_cache_layout.py",
)
for wheel in wheels:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(wanted):
                archive.extract(name, target)
PY
echo "RPA v3 and MLA are in .peer/tpu_inference, sparse_mla in .peer/tokamax"
