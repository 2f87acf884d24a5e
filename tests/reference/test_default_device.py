"""Problems and the truth about them are computed on the CPU under any default device."""

import pytest
import torch

from torch_paged_attn import reference
from torch_paged_attn.testing import Layout, Problem, build
from torch_paged_attn.testing.accuracy import Truth

MIXED = ((1, 5), (3, 0), (0, 2))
PROBLEMS = {
    "paged": Problem("paged", MIXED, page_size=4, dropout_p=0.5, alibi="heads", sinks=True),
    "packed": Problem("packed", MIXED, descale="heads", fused_qkv=True, bias="float"),
    "blocks": Problem("blocks", MIXED, layout=Layout(16, 16)),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_default_device(name):
    problem = PROBLEMS[name]

    def truth():
        call = build(problem)
        assert all(t.device.type == "cpu" for t in call.args.values() if torch.is_tensor(t))
        return Truth.of(getattr(reference, problem.op), **call.args)

    expected = truth()
    with torch.device("meta"):
        result = truth()
    assert torch.equal(result.out, expected.out)
    assert torch.equal(result.softmax_lse, expected.softmax_lse)
