"""What has no gradient on any device is refused at the forward call that would need it."""

import pytest
import torch
from right_calls import packed, paged, sparse

import torch_paged_attn
from torch_paged_attn.backends.cpu import Cpu
from torch_paged_attn.backward_call import BackwardCall


@pytest.fixture(autouse=True)
def has_all(monkeypatch):
    monkeypatch.setattr(Cpu, "unsupported_backward", lambda self, call: None)


def float8(args):
    kv = {name: args[name].to(torch.float8_e4m3fn) for name in "kv"}
    return args | kv | {"k_descale": torch.tensor(2.0)}


REFUSED = {
    "paged": (paged, {}, "q", "block_table came where q requires grad, and there is no backward"),
    "kv8": (
        lambda: float8(packed()),
        {},
        "q",
        "k_descale came where q requires grad, and there is",
    ),
    "kv8_plain": (
        lambda: float8(packed()) | {"k_descale": None},
        {},
        "q",
        "k is float8_e4m3fn where q requires grad; allowed: float32, or no requires_grad",
    ),
    "int8": (
        lambda: packed() | {n: torch.ones(packed()[n].shape, dtype=torch.int8) for n in "kv"},
        {},
        "q",
        "k is int8 where q requires grad; allowed: float32, or no requires_grad",
    ),
    "out_dtype": (
        packed,
        {"out_dtype": torch.bfloat16},
        "v",
        "out_dtype is bfloat16 where v requires grad; allowed: float32, or no requires_grad",
    ),
    "slopes": (
        lambda: packed() | {"alibi_slopes": torch.ones(4)},
        {},
        "alibi_slopes",
        "alibi_slopes requires grad, and has no gradient; allowed: a tensor that does not",
    ),
    "descale": (
        lambda: float8(packed()),
        {},
        "k_descale",
        "k_descale requires grad, and has no gradient; allowed: a tensor that does not",
    ),
}


@pytest.mark.parametrize("make, options, asking, text", REFUSED.values(), ids=REFUSED)
def test_refused(make, options, asking, text):
    args = make()
    args[asking].requires_grad_()
    with pytest.raises(NotImplementedError) as caught:
        torch.ops.paged_attn.flash_varlen(**args, **options)
    assert str(caught.value).startswith(f"paged_attn::flash_varlen: {text}"), str(caught.value)
    assert "; allowed: " in str(caught.value)
    with torch.no_grad():
        torch.ops.paged_attn.flash_varlen(**args, **options)


@pytest.mark.parametrize("make, op", [(packed, "flash_varlen"), (sparse, "blocksparse")])
def test_what_a_backend_has_not(make, op, monkeypatch):
    """It is asked about the call, and what it says is the reason."""

    def reason(self, call):
        assert call.op == op and call.softcap == 3.0
        return f"this backend has no backward with softcap = {call.softcap}"

    monkeypatch.setattr(Cpu, "unsupported_backward", reason)
    args = make() | {"softcap": 3.0}
    args["v"].requires_grad_()
    text = (
        f"^paged_attn::{op}: v requires grad, and this backend has no backward with softcap = 3.0; "
    )
    with pytest.raises(NotImplementedError, match=text):
        getattr(torch.ops.paged_attn, op)(**args)
    with torch.inference_mode():
        getattr(torch.ops.paged_attn, op)(**args)


def test_a_wrong_call_is_wrong_first():
    args = paged()
    args["q"].requires_grad_()
    with pytest.raises(ValueError, match="cu_seqlens_q has dtype int64"):
        torch.ops.paged_attn.flash_varlen(**args | {"cu_seqlens_q": torch.tensor([0, 3, 7])})


def results(args):
    out, lse = torch_paged_attn.flash_varlen(**args)
    del args["max_seqlen_q"], args["max_seqlen_k"]
    return args | {"dout": out, "dlse": lse, "out": out, "softmax_lse": lse}


WRONG = [
    ({"dout": torch.zeros(7, 4, 8)}, "dout has shape (7, 4, 8); allowed: (total_q"),
    ({"dout": torch.zeros(7, 4, 6).half()}, "dout has dtype float16; allowed: float32"),
    ({"out": torch.zeros(7, 4)}, "out has shape (7, 4); allowed: (total_q"),
    ({"dlse": torch.zeros(7, 4)}, "dlse has shape (7, 4); allowed: (num_heads, total_q) = (4, 7)"),
    ({"softmax_lse": torch.zeros(4, 7).double()}, "softmax_lse has dtype float64"),
    ({"k": torch.zeros(9, 2, 8).half(), "v": torch.zeros(9, 2, 6).half()}, "k has dtype float16"),
    ({"q": torch.zeros(7, 4, 5)}, "k has head_dim 8"),
    ({"output_mask": (True, False)}, ""),
]


@pytest.mark.parametrize("changes, text", WRONG)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_wrong_backwards(changes, text, device):
    from torch_paged_attn.ops.flash_varlen_backward import check

    args = results(packed()) | changes
    if text:
        with pytest.raises(ValueError) as caught:
            if device == "cpu":
                check(**args)
            else:
                on_meta = {n: x.to("meta") if torch.is_tensor(x) else x for n, x in args.items()}
                torch_paged_attn.flash_varlen_backward(**on_meta)
        assert str(caught.value).startswith(f"paged_attn::flash_varlen_backward: {text}")
    else:
        with pytest.raises((ValueError, RuntimeError)):
            torch_paged_attn.flash_varlen_backward(**args)


def test_the_user_who_asks_torch_for_the_same_bits_gets_them():
    args = results(packed())
    for asked, by_torch, wanted in (
        (True, False, True),
        (False, False, False),
        (False, True, True),
    ):
        call = BackwardCall.flash_varlen(**args, deterministic=asked)
        torch.use_deterministic_algorithms(by_torch)
        try:
            assert call.deterministic is wanted
        finally:
            torch.use_deterministic_algorithms(False)
