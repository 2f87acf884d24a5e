"""Any plan of `select_keys`: the ids of the formula, whatever keys hold that no query sees."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from same_bits import assert_same_bits
from served import BACKEND

import torch_paged_attn
from torch_paged_attn import reference
from torch_paged_attn.selection_calls import POOLS, SCORES
from torch_paged_attn.testing.inputs import cumulative

if not (BACKEND.is_compiled or BACKEND.has("select_keys")):
    pytest.skip(f"the {BACKEND.name} backend has no select_keys", allow_module_level=True)

FLOATS = torch.float32, torch.bfloat16, torch.float16


@dataclasses.dataclass(frozen=True)
class Plan:
    """Small numbers, from which `arguments` makes the tensors."""

    seqs: tuple[tuple[int, int], ...]  # queries and keys
    groups: int
    heads_per_group: int
    head_dim: int
    dtype: torch.dtype
    k_dtype: torch.dtype | None
    page_size: int | None
    weights_dtype: torch.dtype | None
    positions: tuple[int, ...] | None
    options: dict[str, Any]
    seed: int


@st.composite
def plans(draw):
    seqs = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), max_size=3))
    first, last = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    positions = st.tuples(*(st.integers(-9, 320) for _ in seqs))
    options = {
        "num_units": draw(st.integers(max(1, first + last), 40)),
        "select_size": draw(st.sampled_from((1, 1, 4, 16, 128, 256))),
        "score": draw(st.sampled_from(SCORES)),
        "pool": draw(st.sampled_from(POOLS)),
        "causal": draw(st.booleans()),
        "force_first": first,
        "force_last": last,
    }
    return Plan(
        tuple(seqs),
        groups=draw(st.integers(1, 3)),
        heads_per_group=draw(st.sampled_from((1, 2, 5, 64))),
        head_dim=draw(st.sampled_from((1, 8, 33, 64, 160))),
        dtype=draw(st.sampled_from(FLOATS)),
        k_dtype=draw(st.sampled_from((None, None, torch.int8, torch.float8_e4m3fn))),
        page_size=draw(st.sampled_from((None, 1, 16, 48))),
        weights_dtype=draw(st.sampled_from((None, *FLOATS))),
        positions=draw(st.one_of(st.none(), positions)),
        options=options,
        seed=draw(st.integers(0, 2**16)),
    )


def arguments(plan):
    """Of a call. All numbers are small and whole: scores are exact in whatever order they are added
    up, and many are equal.
    """
    g = torch.Generator().manual_seed(plan.seed)
    query_lens, key_lens = zip(*plan.seqs, strict=True) if plan.seqs else ((), ())
    total_q, heads = sum(query_lens) + 2, plan.groups * plan.heads_per_group  # two of padding

    def whole(*shape):
        return torch.randint(-2, 3, shape, generator=g).float()

    args = {
        "q": whole(total_q, heads, plan.head_dim).to(plan.dtype),
        "weights": None,
        "cu_seqlens_q": cumulative(query_lens),
    } | plan.options
    if plan.weights_dtype is not None:
        args["weights"] = whole(total_q, heads).to(plan.weights_dtype)
    if plan.k_dtype is not None:
        args["k_descale"] = 2.0 ** torch.randint(-2, 3, (plan.groups,), generator=g)
    if plan.positions is not None:
        args["q_position"] = torch.tensor(plan.positions, dtype=torch.int32)
    k = whole(sum(key_lens) + 1, plan.groups, plan.head_dim).to(plan.k_dtype or plan.dtype)
    if plan.page_size is None:
        return args | {"k": k, "cu_seqlens_k": cumulative(key_lens)}
    size = plan.page_size
    pages = [-(-n // size) for n in key_lens]
    order = torch.randperm(sum(pages) + 2, generator=g, dtype=torch.int32)
    table = torch.full((len(pages), max(pages, default=0) + 1), -1, dtype=torch.int32)
    cache = torch.zeros(len(order), plan.groups, size, plan.head_dim).to(k.dtype)
    if plan.k_dtype is None:
        cache.fill_(float("nan"))
    starts = cumulative(key_lens).tolist()
    for b, (count, n) in enumerate(zip(pages, key_lens, strict=True)):
        table[b, :count] = order[sum(pages[:b]) :][:count]
        for j in range(n):
            cache[table[b, j // size], :, j % size] = k[starts[b] + j]
    lengths = torch.tensor(key_lens, dtype=torch.int32)
    return args | {"k": cache, "block_table": table, "seqused_k": lengths}


@given(plans())
def test_select_keys_agrees_with_the_reference(plan):
    args = arguments(plan)
    found = torch_paged_attn.select_keys(**args)
    hints = {"max_seqlen_q": 1, "max_seqlen_k": 9}
    assert_same_bits(found, reference.select_keys(**args | hints))
    assert_same_bits(found, torch_paged_attn.select_keys(**args, **hints))
