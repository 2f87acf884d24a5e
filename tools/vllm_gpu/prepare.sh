#!/bin/bash
# Where PyPI can be reached: vLLM's CUDA wheel and what it needs, in pieces for a GPU machine that
# has torch 2.11 (cu130), Transformers and Python 3.12 but no PyPI.
#     bash tools/vllm_gpu/prepare.sh PIECES
# PIECES is a folder that git ignores. Takes 4 minutes. Libraries keep their sm_90 code only; those
# that a dense bfloat16 model does not call (FA2, MoE, FlashMLA, DeepGEMM) are left out.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
mkdir -p "$1"
pieces=$(realpath "$1")
python=${PYTHON312:-python3.12}
work=${WORK:-${TMPDIR:-/tmp}/vllm_gpu}
mkdir -p "$work"
cd "$work"
[ -d tools ] || "$python" -m venv tools
pip="tools/bin/python -m pip -q"
ls vllm-0.32.0-*.whl 2>/dev/null || $pip download --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp --abi abi3 --platform manylinux_2_28_x86_64 \
    vllm==0.32.0
rm -rf all site
mkdir all site
(cd all && "$python" -m zipfile -e ../vllm-0.32.0-*.whl .)
# the newest fastapi and openai want packages that vLLM's own bounds do not
$pip install --no-compile --no-deps --only-binary=:all: --target site \
    annotated-types blake3 cachetools cbor2 compressed-tensors==0.17.0 depyf==0.20.0 distro \
    'fastapi>=0.133.0,<0.137.0' jiter jsonschema lark==1.2.2 llguidance==1.7.6 \
    lm-format-enforcer==0.11.3 loguru msgspec 'openai<3' oss-harmony outlines_core==0.2.14 \
    partial-json-parser prometheus-fastapi-instrumentator pybase64 pydantic pydantic-settings \
    python-json-logger pyzmq setproctitle sniffio 'starlette<1.5' apache-tvm-ffi==0.1.11 \
    typing-inspection xgrammar==0.2.8
core=$(sed -n 's/^Requires-Dist: pydantic-core==\([0-9.]*\).*/\1/p' site/pydantic-*.dist-info/METADATA)
$pip install --no-compile --no-deps --only-binary=:all: --upgrade --target site "pydantic-core==$core"
cp -r all/. site/
rm -rf site/vllm/third_party/{fmha_sm100,deep_gemm/include} site/vllm/vllm-rs \
    site/vllm/entrypoints/serve/instrumentator/static
find site/vllm -name '*.so' ! -name 'spinloop*' ! -name 'cumem*' -delete
find site \( -name '*.h' -o -name '*.hpp' -o -name '*.cuh' -o -name '*.cu' -o -name '*.map' \
    -o -name '*.pyc' \) -delete
for name in _C_stable_libtorch vllm_flash_attn/_vllm_fa3_C; do
    short=$(basename $name)
    "$python" "$here/fatstrip.py" "all/vllm/$name.abi3.so" "$short"
    nice xz -6 -T2 -f -k "$short"
    mv "$short.xz" "$pieces/"
done
nice tar -C site -cf - . | nice xz -6 -T2 > "$pieces/site.tar.xz"
ls -la "$pieces"
