"""`append_and_attend` is `append_slots`, a rotary embedding, `reshape_and_cache` and
`flash_varlen`, one after another: bit for bit without the embedding, whose fused products round
otherwise.
"""

import pytest
import torch
from covering import every_other

from torch_paged_attn.backends.triton.cache_write.written_slots import FEW_TOKENS
from torch_paged_attn.integrations._kvcache import rotate
from torch_paged_attn.ops.append_slots import positions
from torch_paged_attn.testing import assert_rounded_alike

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
    "many tokens": {"lengths": (1, 0, -1), "new": FEW_TOKENS // 2},
    "ragged": {"new": (2, 0, 1, 3), "seqlen_q": (1, 2, 0, 1)},
    "ragged keys, a page twice": {"new": (1, 3, 0, 2), "table": (2, 2, 2, 2), "lengths": (1,) * 4},
    "ragged, many tokens": {"new": (3, FEW_TOKENS, 0, 5), "seqlen_q": (1, 1, 0, 1)},
    "ragged queries": {"seqlen_q": (0, 3, 1, 1), "lengths": (5, -1, 0, 7)},
    "a row of the cache each": {"table": None, "rows": True},
    "rotary": {"rotary": 16, "new": 3, "seqlen_q": 2},
    "rotary of halves": {"rotary": 12, "interleaved": False, "lengths": (5, -1, 0, 11)},
    "rotary, int8": INT8 | {"rotary": 8, "rotary_dtype": torch.float16},
    "rotary, ragged": {"rotary": 16, "new": (2, 0, 1, 3), "seqlen_q": (1, 2, 0, 1)},
    "rotary, many tokens": {"rotary": 4, "new": FEW_TOKENS, "lengths": (0, 3), "seqlen_q": 5},
    "rotary, all queries at one place": {"rotary": 16, "seqlen_q": 3, "options": {"causal": False}},
    "rotary, strided": {"rotary": 10, "strided": True, "seqlen_q": 2},
}


def inputs(device, *, lengths=(5, 0, 3, 11), new=1, seqlen_q=1, table=None, cache=torch.float32,
           descale=False, sinks=False, strided=False, options=None, rows=False, rotary=0,
           rotary_dtype=torch.float32, interleaved=True):  # fmt: skip
    """The operator's arguments. `new` and `seqlen_q`: of each sequence, or of all."""
    g = torch.Generator().manual_seed(0)
    batch, pages = len(lengths), 1 if rows else 4

    def randn(*shape):
        x = torch.randn(*shape[:-1], shape[-1] * (1 + strided), generator=g)
        return x[..., : shape[-1]].to(device)

    def tokens(counts, heads, dim):
        return randn(*((batch, counts) if isinstance(counts, int) else (sum(counts),)), heads, dim)

    def bounds(counts):
        if isinstance(counts, int):
            return None
        ends = torch.tensor([0, *counts]).cumsum(0)
        return ends.int().to(device)

    def caches(dim):
        return (randn(batch * pages, PAGE, KV_HEADS, dim) * 3).to(cache)

    pages_of = torch.randperm(batch * pages, generator=g).view(batch, pages).int()
    if table is not None:
        pages_of[:, 0] = torch.tensor(table)
    scales = [torch.rand(KV_HEADS, generator=g).to(device) + 0.5 if descale else None] * 2
    angles = torch.rand(pages * PAGE, rotary // 2, generator=g).to(device) * 6
    tables = [x.to(rotary_dtype) if rotary else None for x in (angles.cos(), angles.sin())]
    tensors = (
        tokens(seqlen_q, HEADS, DIM), caches(DIM), caches(DIM_V),
        tokens(new, KV_HEADS, DIM), tokens(new, KV_HEADS, DIM_V),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        None if rows else pages_of.to(device),
        torch.randn(HEADS, generator=g).to(device) if sinks else None, *scales,
        bounds(seqlen_q), bounds(new), *tables,
    )  # fmt: skip
    options = {"causal": True} | (options or {})
    return tensors, options | ({} if interleaved else {"rotary_interleaved": False})


def one_after_another(kernels, tensors, rotary_interleaved=True, **options):
    q, k_cache, v_cache, k, v, lengths, table, sinks, *scales = tensors[:10]
    bounds, new_bounds, cos, sin = tensors[10:]
    batch, rows = len(lengths), q if bounds is not None else q.flatten(0, 1)
    key, value = (x if new_bounds is not None else x.flatten(0, 1) for x in (k, v))
    pages = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    if table is None:
        table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    slots, used = kernels.append_slots(lengths, table, new_bounds, PAGE, len(key))
    if bounds is None:
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q.shape[1]
    if cos is not None:
        of_key, _ = positions(lengths, new_bounds, len(key))
        of_query, owner = positions(lengths, bounds, len(rows))
        if not options["causal"]:
            of_query = lengths[owner]
        key = rotate(key, of_key, cos, sin, rotary_interleaved)
        rows = rotate(rows, of_query, cos, sin, rotary_interleaved)
    stored = scales if k_cache.dtype.itemsize == 1 else ()
    kernels.reshape_and_cache_split(key, value, *pages, slots, *stored)
    return kernels.flash_varlen(
        rows, *pages, bounds, None, 0, 0, used, table, None, None, sinks, None, *scales, **options
    )


def bits(x):
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


# attention is tested with the first two by itself; the others take the interpreter long
OPTIONS = ("sinks", "window", "rotary, many tokens", "many tokens")


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
        out, lse = one_after_another(kernels, others, **options)
        wants = out.view(*tensors[0].shape[:-1], DIM_V), lse
        gots = kernels.append_and_attend(*tensors, **options)
        pairs = [*zip(gots, wants, strict=True), *zip(tensors[1:3], others[1:3], strict=True)]
        for got, want in pairs:
            if tensors[-1] is None:
                assert torch.equal(bits(got), bits(want))
            elif got.dtype == torch.int8:
                assert (got.int() - want.int()).abs().max() <= 1
            else:
                assert_rounded_alike(got, want)


ROTARY = "rotary_cos", "rotary_sin"
NAMES = (
    *("q", "k_cache", "v_cache", "k", "v", "lengths", "table", "sinks", "k_descale", "v_descale"),
    *("cu_seqlens_q", "cu_seqlens_k_new", *ROTARY),
)
WRONG = {
    "no new token": lambda t: t | {"k": t["k"][:, :0], "v": t["v"][:, :0]},
    "another batch": lambda t: t | {"q": t["q"][1:]},
    "ragged": lambda t: t | {"k": t["k"][:, 0], "v": t["v"][:, 0]},
    "rows apart": lambda t: t | {"q": torch.zeros(4, 3, HEADS, DIM).to(t["q"])[:, :2]},
    "lengths": lambda t: t | {"lengths": t["lengths"].long()},
    "heads": lambda t: t | {"v_cache": t["v_cache"][:, :, 1:]},
    "too few rows of the cache": lambda t: t | {"table": None},
    "cos alone": lambda t: t | {"rotary_cos": torch.ones(16, 4).to(t["q"])},
    "too few positions": lambda t: t | dict.fromkeys(ROTARY, torch.ones(15, 4).to(t["q"])),
    "too many columns": lambda t: t | dict.fromkeys(ROTARY, torch.ones(16, 17).to(t["q"])),
    "integers": lambda t: t | dict.fromkeys(ROTARY, torch.ones(16, 4).to(t["table"])),
    "columns apart": lambda t: t | dict.fromkeys(ROTARY, torch.ones(4, 16).to(t["q"]).t()),
    "bounds of another batch": lambda t: t | {"q": t["q"][:, 0], "cu_seqlens_q": t["lengths"]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_it_does_not_take_is_refused_before_anything_is_written(wrong, kernels, device):
    tensors, options = inputs(device)
    given = WRONG[wrong](dict(zip(NAMES, tensors, strict=True)))
    before = given["k_cache"].clone()
    with pytest.raises(ValueError, match=r"\(\): expected "):
        kernels.append_and_attend(*given.values(), **options)
    assert torch.equal(given["k_cache"], before)
