"""What has no gradient on any device is refused at the forward call that would need it."""

import re

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
    "paged": (paged, {}, "q", "no gradient for paged keys: pass packed k and v, or "),
    "kv8": (
        lambda: float8(packed()),
        {},
        "q",
        "no gradient with k_descale, which is for 8 bits: omit it, or ",
    ),
    "kv8_plain": (
        lambda: float8(packed()) | {"k_descale": None},
        {},
        "q",
        "no gradient where k is float8_e4m3fn: pass float32, or ",
    ),
    "int8": (
        lambda: packed() | {n: torch.ones(packed()[n].shape, dtype=torch.int8) for n in "kv"},
        {},
        "q",
        "no gradient where k is int8: pass float32, or ",
    ),
    "out_dtype": (
        packed,
        {"out_dtype": torch.bfloat16},
        "v",
        "no gradient where out_dtype is bfloat16: pass float32, or ",
    ),
    "slopes": (
        lambda: packed() | {"alibi_slopes": torch.ones(4)},
        {},
        "alibi_slopes",
        "no gradient of alibi_slopes: pass alibi_slopes.detach()",
    ),
    "descale": (
        lambda: float8(packed()),
        {},
        "k_descale",
        "no gradient of k_descale: pass k_descale.detach()",
    ),
}


@pytest.mark.parametrize("make, options, asking, text", REFUSED.values(), ids=REFUSED)
def test_refused(make, options, asking, text):
    args = make()
    args[asking].requires_grad_()
    with pytest.raises(NotImplementedError) as caught:
        torch.ops.paged_attn.flash_varlen(**args, **options)
    instead = "call under torch.no_grad()" * text.endswith("or ")
    assert str(caught.value) == f"flash_varlen(): {text}{instead}"
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
    text = rf"^{op}\(\): v requires grad, and this backend has no backward with softcap = 3.0: call"
    with pytest.raises(NotImplementedError, match=text):
        getattr(torch.ops.paged_attn, op)(**args)
    with torch.inference_mode():
        getattr(torch.ops.paged_attn, op)(**args)


def test_a_wrong_call_is_wrong_first():
    args = paged()
    args["q"].requires_grad_()
    with pytest.raises(ValueError, match=r"expected cu_seqlens_q to be int32 .*, got int64"):
        torch.ops.paged_attn.flash_varlen(**args | {"cu_seqlens_q": torch.tensor([0, 3, 7])})


def results(args):
    out, lse = torch_paged_attn.flash_varlen(**args)
    del args["max_seqlen_q"], args["max_seqlen_k"]
    return args | {"dout": out, "dlse": lse, "out": out, "softmax_lse": lse}


WRONG = [
    ({"dout": torch.zeros(7, 4, 8)}, "expected dout to be (total_q ... got shape (7, 4, 8)"),
    ({"dout": torch.zeros(7, 4, 6).half()}, "expected dout to be float32 ... got float16"),
    ({"out": torch.zeros(7, 4)}, "expected out to be (total_q ... got shape (7, 4)"),
    (
        {"dlse": torch.zeros(7, 4)},
        "expected dlse to be (num_heads, total_q) = (4, 7) ... got shape (7, 4)",
    ),
    ({"softmax_lse": torch.zeros(4, 7).double()}, "expected softmax_lse to be ... got float64"),
    (
        {"k": torch.zeros(9, 2, 8).half(), "v": torch.zeros(9, 2, 6).half()},
        "expected k to be ... got float16",
    ),
    ({"q": torch.zeros(7, 4, 5)}, "expected k's head_dim to be"),
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
        pattern = ".*".join(map(re.escape, text.split(" ... ")))
        assert re.match(rf"flash_varlen_backward\(\): {pattern}", str(caught.value))
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
