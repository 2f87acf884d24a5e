"""On a machine without a GPU, what concerns GPUs says so."""

import json
from pathlib import Path

import pytest
import torch

import torch_paged_attn
from torch_paged_attn._doctor import printed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


REPORT = """
import runpy, sys
sys.argv[1:] = ["--json"]
runpy.run_module("torch_paged_attn", run_name="__main__", alter_sys=True)
"""


def test_report_names_no_backend(programs):
    known = json.loads(programs.run(REPORT, str(Path(torch_paged_attn.__file__).parents[1])))
    gpu = known["devices"]["cuda / rocm"]
    assert (gpu["backend"], gpu["ops"]) == (None, [])
    assert f"torch {torch.__version__} finds no GPU here" in gpu["reason"]
    text = printed(known)
    assert f"\ncuda / rocm: none\n  {gpu['reason']}\n" in text


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_warmup_is_refused(device):
    text = rf"warmup\(\): expected device to be a CPU, or one of the 0 GPUs .*, got {device}"
    with pytest.raises(ValueError, match=text):
        torch_paged_attn.warmup(8, 2, 64, device=device)
