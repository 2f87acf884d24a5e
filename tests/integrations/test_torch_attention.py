"""torch.nn.attention's varlen functions on the CPU, after activate_flash_attention_impl."""

import pytest
import torch
from sequences import MIXED, Batch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    varlen,
)

from torch_paged_attn import flash_varlen

NAME = "PAGED_ATTN"
# torch 2.11 has neither of these
HAS_PAGES = "block_table" in varlen.varlen_attn.__kwdefaults__


@pytest.fixture
def activated():
    activate_flash_attention_impl(NAME)
    yield
    restore_flash_attention_impl()


def equal_heads(batch):
    """The keys and values of each query head, for torch 2.11, which has no enable_gqa."""
    group = batch.q.shape[1] // batch.k.shape[1]
    return [x.repeat_interleave(group, 1) for x in (batch.k, batch.v)]


def lengths_of(batch):
    return batch.cu_q, batch.cu_k, max(batch.query_lens), max(batch.key_lens)


def test_import_registers_a_name_and_no_more():
    assert NAME in list_flash_attention_impls()
    assert current_flash_attention_impl() is None
    batch = Batch(*MIXED)
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        varlen.varlen_attn(batch.q, *equal_heads(batch), *lengths_of(batch))


@pytest.mark.parametrize(
    ("window", "options"),
    [
        ((-1, -1), {}),
        ((-1, 0), {"causal": True}),
        ((3, 0), {"window_size_left": 3, "window_size_right": 0}),
        ((2, 4), {"window_size_left": 2, "window_size_right": 4}),
    ],
)
def test_varlen_attn_is_flash_varlen(activated, window, options):
    batch = Batch(*MIXED)
    k, v = equal_heads(batch)
    arguments = batch.q, k, v, *lengths_of(batch)
    aux = varlen.AuxRequest(lse=True)
    got = varlen.varlen_attn(*arguments, window_size=window, scale=0.3, return_aux=aux)
    expected = flash_varlen(*arguments, softmax_scale=0.3, **options)
    assert all(map(torch.equal, got, expected))


@pytest.mark.skipif(not HAS_PAGES, reason="torch 2.11 has no block_table, enable_gqa and out")
@pytest.mark.parametrize("into", [False, True])
def test_pages(activated, into):
    batch = Batch(*MIXED)
    k, v, table = batch.paged(16)
    function, out = varlen.varlen_attn, torch.empty(*batch.q.shape[:2], v.shape[3])
    if into:
        function = varlen.varlen_attn_out
    arguments = batch.q, k, v, *lengths_of(batch)
    options = {"seqused_k": batch.seqused_k, "block_table": table}
    got = function(
        *([out] if into else []), *arguments, window_size=(-1, 0), enable_gqa=True, **options
    )
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    expected, _ = flash_varlen(batch.q, k, v, *arguments[3:], causal=True, **options)
    assert torch.equal(out if into else got, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(activated, dynamic):
    batch = Batch(*MIXED, dim_v=16)  # torch's fake says that out has q's shape
    k, v = equal_heads(batch)
    arguments = batch.q, k, v, *lengths_of(batch)
    compiled = torch.compile(varlen.varlen_attn, fullgraph=True, dynamic=dynamic, backend="eager")
    got = compiled(*arguments, window_size=(-1, 0))
    assert torch.equal(got, flash_varlen(*arguments, causal=True)[0])


def test_dense_batches(activated):
    q, k, v = torch.randn(3, 2, 9, 4, 16)
    arguments = q, k, v, None, None, 9, 9, 0.0, True, False
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*arguments)
    for i in range(2):
        bounds = torch.tensor([0, 9], dtype=torch.int32)
        expected, expected_lse = flash_varlen(q[i], k[i], v[i], bounds, causal=True)
        assert torch.equal(out[i], expected) and torch.equal(lse[i], expected_lse)


def test_the_debug_mask_is_refused(activated):
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match="return_debug_mask"):
        torch.ops.aten._flash_attention_forward(q, q, q, None, None, 4, 4, 0.0, False, True)


def test_restore_brings_torch_back(activated):
    restore_flash_attention_impl()
    batch = Batch(*MIXED)
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        varlen.varlen_attn(batch.q, *equal_heads(batch), *lengths_of(batch))
    activate_flash_attention_impl(NAME)  # and back again, for the fixture to restore
    assert current_flash_attention_impl() == NAME


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients(activated, compiled):
    batch = Batch(*MIXED, dim_v=16)
    inputs = [x.clone().requires_grad_() for x in (batch.q, *equal_heads(batch))]
    function = varlen.varlen_attn
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    out = function(*inputs, *lengths_of(batch), window_size=(-1, 0), scale=0.3)
    expected, _ = flash_varlen(*inputs, *lengths_of(batch), causal=True, softmax_scale=0.3)
    weight = torch.randn(out.shape, generator=batch.generator)
    got = torch.autograd.grad((out * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    assert all(map(torch.equal, got, wanted))


def test_gradients_of_dense_batches_with_dropout(activated):
    q, k, v = torch.randn(3, 2, 9, 4, 16)
    options = None, None, 9, 9, 0.5, True
    out, lse, rng_state, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *options, False)
    dout = torch.randn(out.shape)
    got = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, *options, rng_state, torch.empty(0)
    )
    inputs = [x.flatten(0, 1).clone().requires_grad_() for x in (q, k, v)]
    bounds = torch.tensor([0, 9, 18], dtype=torch.int32)
    packed, _ = flash_varlen(
        *inputs, bounds, causal=True, dropout_p=0.5, rng_state=rng_state.view(torch.int64)
    )
    assert torch.equal(packed, out.flatten(0, 1))
    wanted = torch.autograd.grad(packed, inputs, dout.flatten(0, 1))
    assert all(torch.equal(a.flatten(0, 1), b) for a, b in zip(got, wanted, strict=True))


def test_under_a_default_device(activated):
    """Random numbers of a call on the CPU are the CPU's."""
    q = torch.randn(1, 3, 2, 16)
    with torch.device("meta"):
        out, _, rng_state, *_ = torch.ops.aten._flash_attention_forward(
            *(q, q, q, None, None, 3, 3, 0.5, False, False)
        )
    assert out.device == rng_state.device == q.device
