"""`merge_states` of more parts than one launch takes."""

import torch

from torch_paged_attn import reference
from torch_paged_attn.testing import assert_accurate
from torch_paged_attn.testing.accuracy import Truth


def test_parts_are_merged_in_groups(device, monkeypatch):
    """Their results are parts again."""
    from torch_paged_attn.backends.triton.merges import merge_states

    monkeypatch.setattr(merge_states, "MOST_PARTS", 3)
    g = torch.Generator().manual_seed(0)
    outs = [torch.randn(5, 2, 8, generator=g) for _ in range(10)]
    lses = [torch.randn(2, 5, generator=g) for _ in range(10)]
    truth = Truth.of(reference.merge_states, outs, lses, out_dtype=torch.bfloat16)
    parts = [x.to(device) for x in outs], [x.to(device) for x in lses]
    assert_accurate(*merge_states.merge_states_list(*parts, out_dtype=torch.bfloat16), truth)
