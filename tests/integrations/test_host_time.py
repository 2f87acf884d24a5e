"""What a call of `flash_attn_with_kvcache` costs on the host: tensor operators, views aside."""

import sys
from collections import Counter

import pytest
import torch
from operators import operators
from sequences import DECODE, MIXED, Batch, cumulative
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_paged_attn import flash_varlen
from torch_paged_attn.integrations import _constants
from torch_paged_attn.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_with_kvcache,
    with_kvcache,
)


@pytest.fixture(autouse=True)
def no_constants():
    _constants.clear()
    yield
    _constants.clear()


def decode(new, page_size=4, is_ragged=False, **options):
    """A call of three sequences, each with `new` queries and as many keys to append."""
    batch = Batch([max(new, 1)] * 3, [n + max(new, 1) for n in (6, 11, 0)])
    written = [n - new for n in batch.key_lens]
    k_cache, v_cache, table = batch.paged(page_size, written)
    if new:
        k, v = batch.new(written)
        if is_ragged:
            options["cu_seqlens_k_new"] = cumulative([new] * 3)
        else:
            k, v = (x.unflatten(0, (3, new)) for x in (k, v))
        options |= {"k": k, "v": v}
    lengths = torch.tensor(written, dtype=torch.int32)
    q = batch.q.unflatten(0, (3, -1))
    return lambda: flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True, **options
    )


def test_decode_takes_one_operator():
    assert operators(decode(0)) == {"paged_attn::flash_varlen": 1}


def frames(call):
    """How many Python functions a second call runs."""
    call()
    entered = []

    def note(frame, event, _):
        if event == "call":
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered[1:]  # not `call` itself


@pytest.mark.parametrize("kind", ["paged", "ragged", "rows"])
def test_without_new_tokens_few_python_functions_run(kind):
    """The general code took three times as long on the host as the attention itself."""
    batch = Batch([1] * 3, [7, 12, 1])
    if kind == "rows":
        k_cache, v_cache = batch.rows(12, batch.key_lens)
        table = None
    else:
        k_cache, v_cache, table = batch.paged(4, batch.key_lens)
    lengths = torch.tensor(batch.key_lens, dtype=torch.int32)
    options = {"cache_seqlens": lengths, "block_table": table, "causal": True}
    q = batch.q[:, None]
    if kind == "ragged":
        q, bounds = batch.q, torch.arange(4, dtype=torch.int32)
        options |= {"cu_seqlens_q": bounds, "max_seqlen_q": 1}
    pages = torch.arange(3, dtype=torch.int32)[:, None] if table is None else table
    k, v = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    cu = torch.arange(4, dtype=torch.int32)
    plain = frames(
        lambda: flash_varlen(
            batch.q, k, v, cu, None, 1, 12, seqused_k=lengths, block_table=pages, causal=True
        )
    )
    ours = frames(lambda: flash_attn_with_kvcache(q, k_cache, v_cache, **options))
    assert len(ours) <= len(plain) + 24, Counter(ours)


APPENDING = ("append_slots", "reshape_and_cache.split", "flash_varlen")


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("is_ragged", [False, True], ids=["equal", "ragged"])
def test_new_tokens_take_two_operators_more(new, is_ragged, monkeypatch):
    monkeypatch.setattr(with_kvcache, "readable", lambda x: False)  # as on an accelerator
    called = operators(decode(new, is_ragged=is_ragged))
    assert called == {f"paged_attn::{op}": 1 for op in APPENDING}


def test_rows_and_numbers_take_no_more():
    batch = Batch([1, 1], [5, 5])
    k_cache, v_cache = batch.rows(5, [5, 5])
    q = batch.q[:, None]
    for lengths in (None, 4):
        call = lambda n=lengths: flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=n)  # noqa: E731
        assert operators(call) == {"paged_attn::flash_varlen": 1}


def test_constants_are_kept_and_bounded():
    like = torch.empty(0)
    made = _constants.multiples(3, 2, like)
    assert made.tolist() == [0, 3, 6]
    assert _constants.multiples(3, 2, like) is made
    assert _constants.multiples(2, 3, like).tolist() == [0, 2, 4, 6]
    for value in range(_constants.MOST + 9):
        assert _constants.repeated(value, 1, like).tolist() == [value]
    assert 0 < len(_constants._kept) <= _constants.MOST
    assert _constants.multiples(3, 2, like) is not made


def test_constants_are_ordinary_tensors():
    with torch.inference_mode():
        made = _constants.count(3, torch.empty(0))
        assert not made.is_inference()
    with torch.device("meta"):
        assert _constants.count(4, torch.empty(0, device="cpu")).device.type == "cpu"


def test_fake_constants_are_not_kept():
    real = torch.empty(0)
    with FakeTensorMode():
        _constants.count(3, torch.empty(0))
        _constants.count(3, real)
    assert len(_constants._kept) == 0
    assert type(_constants.count(3, real)) is torch.Tensor


@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
def test_results_do_not_depend_on_the_mode_that_came_first(lengths):
    batch = Batch(*lengths)
    q = batch.q[None]
    with torch.inference_mode():
        first = flash_attn_func(q, q, q, causal=True)
    assert torch.equal(flash_attn_func(q, q, q, causal=True), first)
