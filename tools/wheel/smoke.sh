#!/usr/bin/env bash
# smoke.sh: what a newcomer does: `pip install .` in an empty environment, the report, and one call. Without CPU kernels
# the package has to say why. All of it is deleted at the end.
set -euo pipefail
root=$(realpath "$(dirname "$0")/../..")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet "$root"

cd "$folder"
unset PYTHONPATH
"$python" -m torch_paged_attn --check
"$python" - <<'END'
import torch
from torch_paged_attn import flash_varlen

q, k, v = torch.randn(3, 5, 2, 8)
out, softmax_lse = flash_varlen(q, k, v, torch.tensor([0, 2, 5], dtype=torch.int32), causal=True)
print(out.shape)
END

PAGED_ATTN_BUILD_CPP=0 "$python" -m pip install --quiet --force-reinstall --no-deps "$root"
if "$python" -m torch_paged_attn --check > report.txt; then
  echo "a package without CPU kernels says that it is ready" >&2
  exit 1
fi
head -n 1 report.txt | grep "PAGED_ATTN_BUILD_CPP=0"
