"""`append_and_attend` is `append_slots`, `reshape_and_cache` and `flash_varlen`, bit for bit."""

import pytest
import torch
from covering import every_other

from torch_paged_attn.ops.append_and_attend import MOST_TOKENS

HEADS, KV_HEADS, DIM, DIM_V, PAGE = 4, 2, 32, 16, 4
INT8 = {"cache": torch.int8, "descale": True}

CALLS = {
    "one token": {},
    "several tokens, fewer queries": {"new": 3, "seqlen_q": 2},
    "padding": {"lengths": (5, -1, 0, -7)},
    "past the table": {"lengths": (5, 16, 15, 40), "new": 2},
    "pages that are not there": {"table": (1, -1, 40, 3)},
    "one page for all": {"table": (2, 2, 2, 2), "lengths": (1, 1, 2, 1)},
    "int8": INT8,
    "int8 without descales": {"cache": torch.int8},
    "float8": {"cache": torch.float8_e4m3fn, "descale": True},
    "sinks": {"sinks": True},
    "strided": {"strided": True},
    "window": {"options": {"window_size_left": 3, "softcap": 5.0, "softmax_scale": 0.3}},
    "one sequence": {"lengths": (6,)},
    "more than 32 tokens": {"lengths": (0, 3), "new": 17},
}


def inputs(device, *, lengths=(5, 0, 3, 11), new=1, seqlen_q=1, table=None, cache=torch.float32,
           descale=False, sinks=False, strided=False, options=None):  # fmt: skip
    g = torch.Generator().manual_seed(0)
    batch, pages = len(lengths), 4

    def randn(*shape):
        x = torch.randn(*shape[:-1], shape[-1] * (1 + strided), generator=g)
        return x[..., : shape[-1]].to(device)

    def caches(dim):
        return (randn(batch * pages, PAGE, KV_HEADS, dim) * 3).to(cache)

    pages_of = torch.randperm(batch * pages, generator=g).view(batch, pages).int()
    if table is not None:
        pages_of[:, 0] = torch.tensor(table)
    scales = [torch.rand(KV_HEADS, generator=g).to(device) + 0.5 if descale else None] * 2
    tensors = (
        randn(batch, seqlen_q, HEADS, DIM), caches(DIM), caches(DIM_V),
        randn(batch, new, KV_HEADS, DIM), randn(batch, new, KV_HEADS, DIM_V),
        torch.tensor(lengths, dtype=torch.int32, device=device), pages_of.to(device),
        torch.randn(HEADS, generator=g).to(device) if sinks else None, *scales,
    )  # fmt: skip
    return tensors, {"causal": True} | (options or {})


def one_after_another(kernels, tensors, options):
    q, k_cache, v_cache, k, v, lengths, table, sinks, *scales = tensors
    batch, seqlen_q = q.shape[:2]
    pages = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    slots, used = kernels.append_slots(lengths, table, None, PAGE, batch * k.shape[1])
    stored = scales if k_cache.dtype.itemsize == 1 else ()
    kernels.reshape_and_cache_split(k.flatten(0, 1), v.flatten(0, 1), *pages, slots, *stored)
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
    rows = q.flatten(0, 1)
    return kernels.flash_varlen(
        rows, *pages, bounds, None, 0, 0, used, table, None, None, sinks, None, *scales, **options
    )


def bits(x):
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


# attention is tested with these by itself
OPTIONS = ("sinks", "window")


@pytest.mark.parametrize(
    "name",
    [
        *every_other(x for x in CALLS if x not in OPTIONS),
        *(pytest.param(x, marks=pytest.mark.thorough) for x in OPTIONS),
    ],
)
def test_it_is_the_three_operators_one_after_another(name, kernels, device):
    tensors, options = inputs(device, **CALLS[name])
    others = [x if x is None else x.clone() for x in tensors]
    for _ in range(2 if name == "one token" else 1):  # the second call takes the first one's plan
        wants = one_after_another(kernels, others, options)
        gots = kernels.append_and_attend(*tensors, **options)
        assert all(torch.equal(a, b) for a, b in zip(gots, wants, strict=True))
        for got, want in zip(tensors[1:3], others[1:3], strict=True):
            assert torch.equal(bits(got), bits(want))


WRONG = {
    "no new token": lambda t: t | {"k": t["k"][:, :0], "v": t["v"][:, :0]},
    "too many": lambda t: t | {n: t[n].expand(-1, MOST_TOKENS, -1, -1).clone() for n in "kv"},
    "another batch": lambda t: t | {"q": t["q"][1:]},
    "ragged": lambda t: t | {"k": t["k"][:, 0], "v": t["v"][:, 0]},
    "rows apart": lambda t: t | {"q": torch.zeros(4, 3, HEADS, DIM).to(t["q"])[:, :2]},
    "lengths": lambda t: t | {"lengths": t["lengths"].long()},
    "heads": lambda t: t | {"v_cache": t["v_cache"][:, :, 1:]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_it_does_not_take_is_refused_before_anything_is_written(wrong, kernels, device):
    tensors, options = inputs(device)
    names = "q", "k_cache", "v_cache", "k", "v", "lengths", "table"
    given = WRONG[wrong](dict(zip(names, tensors[:7], strict=True)))
    before = given["k_cache"].clone()
    with pytest.raises(ValueError, match=r"\(\): expected "):
        kernels.append_and_attend(*given.values(), **options)
    assert torch.equal(given["k_cache"], before)
