"""flash-attn's other names: packed tensors, padding, FlashAttention-3, `import flash_attn`."""

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch

import torch_paged_attn
from torch_paged_attn import reference
from torch_paged_attn.integrations import flash_attn
from torch_paged_attn.integrations.flash_attn import bert_padding, flash_attn_3, install, uninstall
from torch_paged_attn.testing import Truth, assert_accurate

BOUNDS = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
OPTIONS = {"causal": True, "window_size": (3, 0), "softcap": 5.0, "softmax_scale": 0.3}


def test_signatures_are_those_of_flash_attn_2_8():
    options = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic"
    expected = {
        "flash_attn_qkvpacked_func": "qkv",
        "flash_attn_kvpacked_func": "q kv",
        "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen",
        "flash_attn_varlen_kvpacked_func": (
            "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
        ),
    }
    for name, first in expected.items():
        names = list(inspect.signature(getattr(flash_attn, name)).parameters)
        assert names == [*first.split(), *options.split(), "return_attn_probs"]


def test_signatures_are_those_of_flash_attn_3():
    descales = "q_descale k_descale v_descale window_size attention_chunk softcap"
    end = "deterministic sm_margin return_attn_probs"
    splits = "num_splits pack_gqa"
    lengths = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k"
    expected = {
        "flash_attn_func": f"q k v softmax_scale causal qv {descales} {splits} {end}",
        "flash_attn_varlen_func": (
            f"q k v {lengths} softmax_scale causal qv {descales} {splits} {end}"
        ),
        "flash_attn_qkvpacked_func": (
            f"qkv softmax_scale causal {descales} deterministic num_heads_q sm_margin"
            " return_attn_probs"
        ),
        "flash_attn_with_kvcache": (
            "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx"
            " cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens"
            " q_descale k_descale v_descale softmax_scale causal window_size attention_chunk"
            " softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin"
            " return_softmax_lse"
        ),
        "flash_attn_combine": "out_partial lse_partial out out_dtype",
    }
    for name, names in expected.items():
        assert list(inspect.signature(getattr(flash_attn_3, name)).parameters) == names.split()


def test_packed_tensors_are_their_parts():
    qkv = torch.randn(2, 7, 3, 4, 8)
    expected = flash_attn.flash_attn_func(*qkv.unbind(2), **OPTIONS)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, **OPTIONS), expected)
    got = flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], **OPTIONS)
    assert torch.equal(got, expected)


def test_packed_ragged_tensors_are_their_parts():
    qkv = torch.randn(14, 3, 4, 8)
    lengths = BOUNDS, BOUNDS, 9, 9
    expected = flash_attn.flash_attn_varlen_func(*qkv.unbind(1), *lengths, **OPTIONS)
    got = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, BOUNDS, 9, **OPTIONS)
    assert torch.equal(got, expected)
    got = flash_attn.flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], *lengths, **OPTIONS)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        ("flash_attn_qkvpacked_func", (torch.ones(2, 7, 2, 4, 8),), r"qkv must be .*\(2, 7, 2, 4"),
        ("flash_attn_kvpacked_func", (torch.ones(2, 7, 4, 8), torch.ones(2, 7, 8)), "kv must be"),
        ("flash_attn_varlen_qkvpacked_func", (None, BOUNDS, 9), "qkv to be a tensor, got None"),
    ],
)
def test_what_is_not_packed_is_refused(function, arguments, text):
    with pytest.raises((ValueError, TypeError), match=rf"{function}(\(\): expected|:) {text}"):
        getattr(flash_attn, function)(*arguments)


def test_padding_goes_and_comes_back():
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    hidden = torch.arange(12.0).reshape(3, 4, 1).requires_grad_()
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(hidden, mask)
    assert indices.tolist() == [0, 1, 8, 10, 11] and rows.flatten().tolist() == indices.tolist()
    assert cu_seqlens.tolist() == [0, 2, 2, 5] and cu_seqlens.dtype == torch.int32
    assert longest == 3 and used.tolist() == [2, 0, 3]
    padded = bert_padding.pad_input(rows, indices, 3, 4)
    assert torch.equal(padded[..., 0], hidden[..., 0] * mask)
    padded.sum().backward()
    assert torch.equal(hidden.grad[..., 0], mask.float())
    _, indices, cu_seqlens, longest, used = bert_padding.unpad_input(hidden, mask, unused)
    assert indices.tolist() == [0, 1, 2, 8, 10, 11] and cu_seqlens.tolist() == [0, 3, 3, 6]
    assert longest == 3 and used.tolist() == [2, 0, 3]


def test_several_sequences_in_a_row_come_apart():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]])
    hidden = torch.arange(18.0).reshape(3, 6, 1)
    unpadded = bert_padding.unpad_input_for_concatenated_sequences(hidden, lengths)
    rows, indices, cu_seqlens, longest = unpadded
    assert indices.tolist() == [*range(5), *range(6, 15)]
    assert rows.flatten().tolist() == indices.tolist()
    assert cu_seqlens.tolist() == [0, 2, 5, 11, 12, 13, 14] and longest == 6


def test_flash_attn_3_takes_its_own_order():
    q, k, v = torch.randn(3, 14, 4, 8)
    lengths = BOUNDS, BOUNDS, 9, 9
    expected = flash_attn.flash_attn_varlen_func(
        q, k, v, *lengths, causal=True, softmax_scale=0.3, return_softmax_lse=True
    )
    got = flash_attn_3.flash_attn_varlen_func(
        q, k, v, *lengths, None, None, 0.3, True, return_attn_probs=True
    )
    assert all(map(torch.equal, got, expected))
    dense = [x[None] for x in (q, k, v)]
    got = flash_attn_3.flash_attn_func(*dense, 0.3, True)
    assert torch.equal(got, flash_attn.flash_attn_func(*dense, causal=True, softmax_scale=0.3))
    both = flash_attn_3.flash_attn_qkvpacked_func(torch.stack(dense, 2), 0.3, True)
    assert torch.equal(got, both)
    fused = torch.cat([dense[0], dense[1][:, :, :2], dense[2][:, :, :2]], 2)
    got = flash_attn_3.flash_attn_qkvpacked_func(fused, 0.3, True, num_heads_q=4)
    grouped = dense[0], dense[1][:, :, :2], dense[2][:, :, :2]
    assert torch.equal(got, flash_attn_3.flash_attn_func(*grouped, 0.3, True))


def test_flash_attn_3_reads_pages():
    q, cache = torch.randn(2, 1, 4, 8), torch.randn(2, 3, 4, 2, 8)
    table = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)
    lengths = torch.tensor([6, 3], dtype=torch.int32)
    given = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
    expected = flash_attn.flash_attn_with_kvcache(q, *cache, block_table=table, **given)
    got = flash_attn_3.flash_attn_with_kvcache(q, *cache, page_table=table, **given)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("parts", [1, 3])
def test_combine_is_attention_over_all_keys(parts):
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 9, 3, 8), torch.randn(2, 9, 3, 8)
    pieces = zip(k.chunk(parts, 1), v.chunk(parts, 1), strict=True)
    results = [flash_attn.flash_attn_func(q, *kv, return_softmax_lse=True) for kv in pieces]
    outs = torch.stack([out for out, _ in results])
    lses = torch.stack([lse.transpose(1, 2) for _, lse in results])
    out, lse = flash_attn_3.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)
    assert out.shape == q.shape and out.dtype == torch.bfloat16 and lse.shape == q.shape[:3]
    given = torch.empty_like(q)
    assert flash_attn_3.flash_attn_combine(outs, lses, given)[0] is given
    bounds = torch.tensor([0, 4, 8]).int(), torch.tensor([0, 9, 18]).int()
    truth = Truth.of(reference.flash_varlen, *(x.flatten(0, 1) for x in (q, k, v)), *bounds)
    assert_accurate(given.flatten(0, 1), lse.flatten(0, 1).T, truth)


def low_level(q, k, v, **options):
    """The arguments of `_flash_attn_varlen_forward` behind the lengths."""
    given = {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": True} | options
    return (q, k, v, BOUNDS, BOUNDS, 9, 9), given


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_the_functions_below_autograd(installed, dropout_p):
    """Forward and backward by hand give what autograd gives."""
    from flash_attn import flash_attn_interface as theirs

    q, k, v, dout = torch.randn(4, 14, 4, 8)
    args, options = low_level(q, k, v, dropout_p=dropout_p, window_size_left=3)
    out, lse, nothing, rng_state = theirs._flash_attn_varlen_forward(*args, **options)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    known = {"rng_state": rng_state, "dropout_p": dropout_p} if dropout_p else {}
    common = {"softmax_scale": 0.3, "causal": True, "window_size_left": 3, **known}
    expected, expected_lse = torch_paged_attn.flash_varlen(*leaves, BOUNDS, **common)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert nothing.numel() == 0 and rng_state.shape == (2,)
    expected.backward(dout)
    results = [torch.empty_like(x) for x in (q, k, v)]
    sums = theirs._flash_attn_varlen_backward(
        dout, *args[:3], out, lse, *results, *args[3:], dropout_p, 0.3, True, 3, -1, 0.0, None,
        True, rng_state,
    )  # fmt: skip
    for got, leaf in zip(results, leaves, strict=True):
        assert torch.equal(got, leaf.grad)
    assert torch.equal(sums, (dout * out).sum(-1).T)


def test_the_dense_functions_below_autograd(installed):
    from flash_attn import flash_attn_interface as theirs

    q, k, v, dout = torch.randn(4, 2, 7, 4, 8)
    options = 0.0, 0.3, True, -1, 0, 5.0, None
    out, lse, _, rng_state = theirs._flash_attn_forward(q, k, v, *options, False)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = flash_attn.flash_attn_func(
        *leaves, softmax_scale=0.3, causal=True, softcap=5.0, return_softmax_lse=True
    )
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    expected.backward(dout)
    dq, dk = torch.empty_like(q), torch.empty(2, 4, 7, 8).transpose(1, 2)
    sums = theirs._flash_attn_backward(
        dout, q, k, v, out, lse, dq, dk, None, *options, False, rng_state
    )
    assert torch.equal(dq, leaves[0].grad) and torch.equal(dk, leaves[1].grad)
    assert sums.shape == lse.shape


def test_names_of_what_is_refused_say_what_to_do(installed):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    q, k, v = torch.randn(3, 14, 4, 8)
    args, options = low_level(q, k, v)
    with pytest.raises(NotImplementedError, match=r"leftpad_k is not supported: .*cache_leftpad"):
        _flash_attn_varlen_forward(*args, **options, leftpad_k=BOUNDS)
    for name, value in (("seqused_q", BOUNDS), ("leftpad_k", BOUNDS), ("attention_chunk", 4)):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported: "):
            flash_attn.flash_attn_varlen_func(*args, **{name: value})


def test_a_learnable_sink_is_s_aux():
    x, sinks = torch.randn(1, 14, 4, 8), torch.randn(4)
    expected = flash_attn.flash_attn_func(x, x, x, s_aux=sinks)
    assert torch.equal(flash_attn.flash_attn_func(x, x, x, learnable_sink=sinks), expected)
    rows, lengths = x[0], (BOUNDS, BOUNDS, 9, 9)
    varlen = flash_attn.flash_attn_varlen_func
    expected = varlen(rows, rows, rows, *lengths, s_aux=sinks)
    assert torch.equal(varlen(rows, rows, rows, *lengths, learnable_sink=sinks), expected)
    with pytest.raises(ValueError, match="s_aux and learnable_sink"):
        flash_attn.flash_attn_func(x, x, x, s_aux=sinks, learnable_sink=sinks)


def test_qv_is_q_latent():
    """FlashAttention-3's scale counts the elements of q and qv."""
    q, k = torch.randn(2, 14, 4, 8)
    qv, v = torch.randn(2, 14, 4, 6)
    options = {"q_latent": qv, "softmax_scale": (8 + 6) ** -0.5, "causal": True}
    expected, _ = torch_paged_attn.flash_varlen(q, k, v, BOUNDS, **options)
    lengths = (BOUNDS, BOUNDS, 9, 9)
    got = flash_attn_3.flash_attn_varlen_func(q, k, v, *lengths, qv=qv, causal=True)
    assert torch.equal(got, expected)
    halves = torch.tensor([0, 7, 14])
    expected, _ = torch_paged_attn.flash_varlen(q, k, v, halves, **options)
    got = flash_attn_3.flash_attn_func(
        *(x.view(2, 7, 4, -1) for x in (q, k, v)), qv=qv.view(2, 7, 4, 6), causal=True
    )
    assert torch.equal(got.flatten(0, 1), expected)


@pytest.mark.parametrize("ragged", [False, True])
def test_qv_with_a_cache(ragged):
    q, qv = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 6)
    k_cache, v_cache = torch.randn(3, 8, 1, 8), torch.randn(3, 8, 1, 6)
    new = torch.randn(2, 3, 1, 8), torch.randn(2, 3, 1, 6)
    given = {"cache_seqlens": torch.tensor([0, 2]), "causal": True}
    given["page_table"] = torch.tensor([[2], [0]])
    if ragged:
        given["cu_seqlens_q"] = torch.tensor([0, 1, 2])
        q, qv = q[:, 0], qv[:, 0]
    got = flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, *new, qv=qv, **given)
    assert torch.equal(k_cache[2, :3], new[0][0]) and torch.equal(v_cache[0, 2:5], new[1][1])
    expected, _ = torch_paged_attn.flash_varlen(
        q.reshape(2, 4, 8),
        *(x.transpose(1, 2) for x in (k_cache, v_cache)),
        torch.tensor([0, 1, 2]),
        seqused_k=torch.tensor([3, 5]),
        block_table=given["page_table"],
        q_latent=qv.reshape(2, 4, 6),
        softmax_scale=(8 + 6) ** -0.5,
        causal=True,
    )
    assert torch.equal(got.reshape(2, 4, 6), expected)
    assert got.shape == (*q.shape[:-1], 6)


@pytest.fixture
def installed():
    install()
    yield
    uninstall()


def test_import_finds_our_functions(installed):
    import flash_attn as theirs
    import flash_attn_interface
    from flash_attn.bert_padding import unpad_input
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    assert theirs.flash_attn_func is flash_attn.flash_attn_func
    assert flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
    assert unpad_input is bert_padding.unpad_input
    assert flash_attn_interface.flash_attn_combine is flash_attn_3.flash_attn_combine
    # as docs/clients/flash-attn.md says to see it
    assert "torch_paged_attn" in theirs.__file__ and "torch_paged_attn" in inspect.getsource(theirs)
    assert theirs.__version__ == "2.8.3" and importlib.util.find_spec("flash_attn") is not None
    assert not hasattr(theirs, "install")
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.losses"):
        importlib.import_module("flash_attn.losses")
    install()  # a second time changes nothing
    assert sys.modules["flash_attn"] is theirs


def test_uninstall_leaves_nothing():
    install()
    uninstall()
    assert importlib.util.find_spec("flash_attn") is None
    uninstall()


def test_transformers_does_not_take_it_for_flash_attn(installed):
    from transformers.utils import is_flash_attn_2_available

    assert not is_flash_attn_2_available()


def test_another_flash_attn_stays(tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="another package provides the module flash_attn"):
        install()
    assert "flash_attn_interface" not in sys.modules


def test_nothing_is_installed_by_an_import(programs):
    program = (
        "import sys, torch_paged_attn.integrations.flash_attn;"
        "assert not {'flash_attn', 'flash_attn_interface'} & sys.modules.keys()"
    )
    programs.run(program, str(Path(torch_paged_attn.__file__).parents[1]))


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_is_of_the_backward(deterministic):
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        calls = ()

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is torch.ops.paged_attn.flash_varlen_backward.default:
                self.calls += ((kwargs or {}).get("deterministic", True),)
            return op(*args, **(kwargs or {}))

    q, k, v = (torch.randn(14, 4, 8, requires_grad=True) for _ in range(3))
    with Seen() as seen:
        out = flash_attn.flash_attn_varlen_func(
            q, k, v, BOUNDS, BOUNDS, 9, 9, deterministic=deterministic
        )
        out.sum().backward()
    assert seen.calls == (deterministic,)
