"""`flash_attn_with_kvcache`: other forms of its arguments, and errors in its own names."""

import numpy
import pytest
import torch
from kvcache_calls import EIGHT_BITS, ROWS, good_call, int32, ragged
from sequences import DIM, HEADS, KV_HEADS

from torch_paged_attn.integrations.flash_attn import flash_attn_with_kvcache

# other forms of the arguments of a good call -> a call of the usual form
FORMS = {
    "lengths of 64 bits": ({"cache_seqlens": torch.tensor([3, 5])}, {}),
    "pages of 64 bits": ({"block_table": torch.tensor([[4, 1], [0, 2]])}, {}),
    "bounds of 64 bits": (
        ragged() | {x: torch.tensor([0, 2, 4]) for x in ("cu_seqlens_q", "cu_seqlens_k_new")},
        ragged(),
    ),
    "rows of 64 bits": (
        ROWS | {"cache_batch_idx": torch.tensor([2, 0])},
        ROWS | {"cache_batch_idx": int32(2, 0)},
    ),
    "padding of 64 bits": (
        {"cache_leftpad": torch.tensor([1, 0])},
        {"cache_leftpad": int32(1, 0)},
    ),
    "a numpy length": ({"cache_seqlens": numpy.int64(3)}, {"cache_seqlens": 3}),
    "scales of shape (1,)": (
        EIGHT_BITS | {"k_descale": torch.tensor([0.5]), "v_descale": torch.tensor([2.0])},
        EIGHT_BITS | {"k_descale": torch.tensor(0.5), "v_descale": torch.tensor(2.0)},
    ),
}


@pytest.mark.parametrize("with_new", [True, False], ids=["new", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_give_the_same(form, with_new):
    results = []
    for changes in FORMS[form]:
        call = good_call() | changes
        call |= {name: call[name].clone() for name in ("k_cache", "v_cache")}
        if not with_new:
            call |= {"k": None, "v": None, "cu_seqlens_k_new": None}
        results.append((flash_attn_with_kvcache(**call), call["k_cache"].float()))
    assert all(map(torch.equal, *results))


ROOM = "of a row of k_cache"
# without a block table no error speaks of one
WITHOUT_TABLE = {
    "too long": ({"cache_seqlens": int32(3, 9)}, RuntimeError, rf"seqlens\[1\] .* 8, .* {ROOM}"),
    "negative": ({"cache_seqlens": int32(3, -1)}, ValueError, rf"seqlens\[1\] .* 8, .* {ROOM}"),
    "other rows": ({"q": torch.zeros(2, 2, HEADS, DIM)}, ValueError, r"k_cache.shape\[0\] to be 2"),
    "a gradient": (
        {"q": torch.zeros(3, 2, HEADS, DIM, requires_grad=True)},
        NotImplementedError,
        "no gradient through a KV cache",
    ),
    "other values": (
        {"v_cache": torch.zeros(3, 8, KV_HEADS, DIM).bfloat16()},
        ValueError,
        "v_cache",
    ),
    "no slots": (
        {name: torch.zeros(3, 0, KV_HEADS, DIM) for name in ("k_cache", "v_cache")},
        ValueError,
        "k_cache to be at least 1",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_TABLE)
def test_without_a_table_errors_name_the_cache(name):
    changes, error, text = WITHOUT_TABLE[name]
    call = {"q": torch.zeros(3, 2, HEADS, DIM), "cache_seqlens": int32(3, 5, 8), **ROWS}
    if "cache_seqlens" in changes:
        changes = {"cache_seqlens": torch.cat([changes["cache_seqlens"], int32(1)])}
    with pytest.raises(error, match=rf"^flash_attn_with_kvcache\(\): .*{text}") as raised:
        flash_attn_with_kvcache(**call | changes)
    assert "table" not in str(raised.value) or name == "other rows"
