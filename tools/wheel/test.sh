#!/usr/bin/env bash
# test.sh WHEEL TORCH [PYTEST ARGUMENTS]: installs a wheel into an empty environment with that torch and runs the
# conformance suite on it, from a directory where this checkout's package is not. All of it is deleted at the end
# (torch 2.13.0 from a local file of CPU builds takes 1 GB, PyPI's builds with CUDA 5 GB).
set -euo pipefail
wheel=$(realpath "$1") torch=$2
shift 2
root=$(realpath "$(dirname "$0")/../..")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet "torch==$torch" "$wheel" pytest pytest-timeout hypothesis

mkdir "$folder/suite"
cp -r "$root/tests" "$root/pyproject.toml" "$folder/suite"
cd "$folder/suite"
unset PYTHONPATH
"$python" - "$folder/venv" <<'END'
import sys
import torch
import torch_paged_attn
assert torch_paged_attn.__file__.startswith(sys.argv[1]), torch_paged_attn.__file__
print("torch", torch.__version__, torch_paged_attn.__file__)
END
"$python" -m torch_paged_attn --check
"$python" -m pytest -q tests/backends --backend cpu "$@"
