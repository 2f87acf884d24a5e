"""`attend_cache` is `flash_varlen` of views of the same memory, bit for bit."""

import functools

import pytest
import torch

HEADS, KV_HEADS, DIM, DIM_V, PAGE = 4, 2, 32, 16, 4
LENGTHS = 5, 0, 3, 11

CALLS = {
    "one token": {},
    "several tokens": {"seqlen_q": 3},
    "ragged": {"queries": (2, 1, 0, 4)},
    "a row for each sequence": {"pages": 0},
    "int8": {"cache": torch.int8, "descale": True},
    "sinks, slopes": {"extra": True},
    "window": {"options": {"window_size_left": 3, "softcap": 5.0, "softmax_scale": 0.3}},
}


def inputs(device, seqlen_q=1, queries=None, pages=4, cache=torch.float32, descale=False,
           extra=False, options=None):  # fmt: skip
    """The operator's arguments, and those of `flash_varlen` for the same call."""
    g = torch.Generator().manual_seed(0)
    batch = len(LENGTHS)

    def randn(*shape):
        return torch.randn(*shape, generator=g).to(device)

    def ints(values):
        return torch.tensor([*values], dtype=torch.int32, device=device)

    count, slots = (batch * pages, PAGE) if pages else (batch, PAGE * 4)
    k, v = ((randn(count, slots, KV_HEADS, dim) * 3).to(cache) for dim in (DIM, DIM_V))
    table = torch.randperm(count, generator=g).view(batch, -1).int().to(device) if pages else None
    each = queries or [seqlen_q] * batch
    rows, bounds = randn(sum(each), HEADS, DIM), ints([sum(each[:i]) for i in range(batch + 1)])
    scales = dict.fromkeys(("k_descale", "v_descale"), randn(KV_HEADS).abs()) if descale else {}
    if extra:
        scales |= {"sinks": randn(HEADS), "alibi_slopes": randn(HEADS).abs()}
    options = {"causal": True} | (options or {})
    given = {
        "q": rows if queries else rows.view(batch, seqlen_q, HEADS, DIM),
        "k_cache": k,
        "v_cache": v,
        "cache_seqlens": ints(LENGTHS),
        "block_table": table,
        "cu_seqlens_q": bounds if queries else None,
        "options": options | ({"max_seqlen_q": max(each)} if queries else {}),
        **scales,
    }
    wants = {
        "q": rows,
        "k": k.transpose(1, 2),
        "v": v.transpose(1, 2),
        "cu_seqlens_q": bounds,
        "max_seqlen_q": max(each),
        "seqused_k": ints(LENGTHS),
        "block_table": ints(range(batch))[:, None] if table is None else table,
        **scales,
        **options,
    }
    return given, wants


def attend(kernels, given):
    names = "alibi_slopes", "sinks", "q_descale", "k_descale", "v_descale"
    first = "q", "k_cache", "v_cache", "cache_seqlens", "block_table", "cu_seqlens_q"
    tensors = [given.get(name) for name in (*first, *names)]
    return kernels.attend_cache(*tensors, **given["options"])


@pytest.mark.parametrize("name", CALLS)
def test_it_is_flash_varlen(name, kernels, device):
    from dispatched import dispatched

    given, wanted = inputs(device, **CALLS[name])
    args, options = dispatched("flash_varlen", wanted)
    out, lse = kernels.flash_varlen(*args, **options)
    want = out.view(*given["q"].shape[:-1], DIM_V), lse
    for _ in range(2):  # the second call takes the first one's plan
        got = attend(kernels, given)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_step_over_heads_is_flash_varlen(kernels, device):
    """Of Transformers: one query in each row of a dense cache, of which some is not written."""
    from dispatched import dispatched

    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, length, dim, generator=g).to(device)
        for heads, length, dim in ((HEADS, 1, DIM), (KV_HEADS, 9, DIM), (KV_HEADS, 9, DIM_V))
    )
    count = 2 * KV_HEADS
    ints = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    bounds, used, first = ints(range(count + 1)), ints([7, 7, 5, 5]), ints([0, 9, 20, 29])
    wanted = {
        "q": q.view(count, HEADS // KV_HEADS, DIM),
        "k": k.view(-1, 1, DIM),
        "v": v.view(-1, 1, DIM_V),
        "cu_seqlens_q": bounds,
        "seqused_k": used,
        "k_start": first,
        "causal": True,
    }
    args, options = dispatched("flash_varlen", wanted)
    want = kernels.flash_varlen(*args, **options)
    for _ in range(2):
        others = None, bounds, None, None, None, None, None, first
        got = kernels.attend_cache(
            q, k, v, used, *others, max_seqlen_q=1, max_seqlen_k=7, causal=True
        )
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for wrong in (q.transpose(1, 2), q[:1], q.expand(-1, -1, 3, -1).contiguous()):
        with pytest.raises(ValueError, match="expected "):
            kernels.attend_cache(wrong, k, v, used, *others, causal=True)


WRONG = {
    "q without sequences": lambda x: {"q": x["q"][:, 0]},
    "rows apart": lambda x: {"q": torch.zeros(4, 3, HEADS, DIM).to(x["q"])[:, :2]},
    "packed keys": lambda x: {"k_cache": x["k_cache"][0]},
    "another batch": lambda x: {"q": x["q"][1:]},
    "lengths": lambda x: {"cache_seqlens": x["cache_seqlens"].long()},
    "heads": lambda x: {"v_cache": x["v_cache"][:, :, 1:]},
    "rows of another batch": lambda x: {"block_table": None},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_it_does_not_take_is_refused(wrong, kernels, device):
    given, _ = inputs(device)
    with pytest.raises(ValueError, match=r"\(\): expected "):
        attend(kernels, given | WRONG[wrong](given))
