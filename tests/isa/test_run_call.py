"""The program that runs other processors' kernels without torch hands over every member that they
read: here it has plain C++, which runs wherever there is a compiler.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
import truths

from torch_paged_attn.testing import (
    DIFFERENTIABLE,
    PROBLEMS,
    assert_accurate,
    assert_accurate_gradients,
    build,
)
from torch_paged_attn.testing.inputs import hostile_gradients

sys.path.insert(0, str(Path(__file__).parent))
import build_run_call
import run_call

ONLY_TABLE = "const paged_attn::Kernels& paged_attn::kernels() { return kernels_generic; }"
NO_DTYPE = "unsupported"
OTHER_NAMES = {"boolean": "bool", "int4": "uint8"}

# what a call may have: pages, windows, scales, slopes, a bias of each kind, sinks, dropout, layouts
FORWARD = ("llama3_8b/mixed/kv_int8", "vllm_cache/mixed/bf16", "odd_sizes/f32", "t5/bias/f32")
FORWARD += ("gpt_oss/sinks_window/bf16", "mpt/alibi_batch/f32", "blocksparse/batched/f32")
BACKWARD = ("training/bool_bias/f16", "training/dropout/f32", "training/everything/f32")


def test_types_have_the_numbers_of_the_kernels():
    header = (build_run_call.ROOT / "csrc/core/attention.h").read_text()
    body = re.search(r"enum class DType : int32_t \{(.*?)\}", header, re.DOTALL)[1]
    names = re.findall(r"^ *(\w+),?", re.sub(r"//.*", "", body), re.MULTILINE)
    assert names.pop() == NO_DTYPE
    assert [getattr(torch, OTHER_NAMES.get(name, name)) for name in names] == run_call.DTYPES


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if build_run_call.CXX is None:
        pytest.skip("needs g++")
    return build_run_call.built_once(tmp_path_factory, "generic", build_program)


def build_program(folder):
    build_run_call.link(folder, ONLY_TABLE, [build_run_call.compiled("generic", folder, [])])


@pytest.mark.parametrize("name", FORWARD)
def test_agrees_with_the_reference(name, program, tmp_path):
    out, lse = run_call.attend(build(PROBLEMS[name]), [program], tmp_path)
    assert_accurate(out, lse, truths.of(PROBLEMS[name]))


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_agree_with_the_reference(name, program, tmp_path):
    call = build(DIFFERENTIABLE[name])
    out, lse = call.run()
    dout, dlse = hostile_gradients(call, out, lse)
    found = run_call.attend_backward(call, dout, dlse, out, lse, [program], tmp_path)
    assert_accurate_gradients(found, call.gradients(dout, dlse))
