"""A step of one token of a dense cache: what it computes, and what it costs on the host."""

from types import SimpleNamespace

import pytest
import torch
from operators import operators

pytest.importorskip("transformers")

from torch_paged_attn import flash_varlen
from torch_paged_attn.integrations import _transformers_dense as dense
from torch_paged_attn.integrations import transformers as paged
from torch_paged_attn.integrations._transformers_short import ShortMask
from torch_paged_attn.testing import assert_as_right_as

BATCH, HEADS, KV_HEADS, DIM, KEYS = 3, 6, 2, 16, 21
LAYER = SimpleNamespace(is_causal=True)


def tensors(room=KEYS, dim_v=DIM):
    """q, k and v of a layer, whose cache has room for so many keys."""
    generator = torch.Generator().manual_seed(5)
    new = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    q = new(BATCH, 1, HEADS, DIM).transpose(1, 2)
    return q, new(BATCH, KV_HEADS, room, DIM), new(BATCH, KV_HEADS, room, dim_v)


def mask(room=KEYS, written=KEYS, window=-1, keys=None):
    size = BATCH, 1, 1, room
    return ShortMask.of(lambda: None, size, "cpu", True, window, written, keys)


def padded(*padding):
    """Rows with so many tokens of padding on the left."""
    return torch.arange(KEYS) >= torch.tensor(padding)[:, None]


def formula(q, k, v, seen, softcap):
    """seen: (batch, keys) bool"""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    logits = softcap * torch.tanh(q @ k.mT * DIM**-0.5 / softcap)
    logits = logits.masked_fill(~seen[:, None, None], float("-inf"))
    return (logits.softmax(-1) @ v).transpose(1, 2)


CASES = {
    "grown": {},
    "static": {"room": 40},
    "window": {"window": 4},
    "wide window": {"window": 400},
    "padded": {"keys": padded(0, 7, 20)},
    "padded window": {"keys": padded(0, 7, 20), "window": 4},
    "padded static": {"keys": padded(3, 0, 1), "room": 33},
    "narrow values": {"dim_v": 8},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_step_sees_what_its_mask_shows(options):
    options = dict(options)
    room, dim_v = options.get("room", KEYS), options.pop("dim_v", DIM)
    q, k, v = tensors(room, dim_v)
    short = mask(**options)
    positions = torch.arange(room)
    seen = (positions < KEYS).expand(BATCH, -1).clone()
    if (keys := options.get("keys")) is not None:
        seen[:, :KEYS] &= keys
    if (window := options.get("window", -1)) >= 0:
        seen &= positions >= KEYS - 1 - window
    k[:, :, KEYS:], v[:, :, KEYS:] = float("nan"), float("nan")
    assert dense.attend_step(q, k, v, short, None, 0.0) is not None
    out, _ = paged.attention_forward(LAYER, q, k, v, short, softcap=5.0)
    given = q, k.nan_to_num(), v.nan_to_num()
    golden, peer = formula(*(x.double() for x in given), seen, 5.0), formula(*given, seen, 5.0)
    assert_as_right_as(out, golden, peer)


@pytest.mark.parametrize("options", [{}, {"keys": padded(0, 7, 20)}], ids=["plain", "padded"])
def test_layers_of_a_step_share_its_lengths(options):
    """The first layer makes three tensors of lengths; in each, attention is the one operator."""
    q, k, v = tensors()
    short = mask(**options)
    call = lambda: paged.attention_forward(LAYER, q, k, v, short)  # noqa: E731
    assert operators(call) == {"paged_attn::flash_varlen": 1}


def test_other_calls_go_another_way():
    q, k, v = tensors()
    holes = padded(0, 7, 20)
    holes[0, 3] = False
    packed = mask()
    packed.cu_seqlens = torch.tensor([0, 1])
    for short in (mask(keys=holes), packed):
        assert dense.attend_step(q, k, v, short, None, 0.0) is None
    tokens = k.transpose(1, 2).contiguous().transpose(1, 2)
    assert dense.attend_step(q, tokens, v, mask(), None, 0.0) is None
    assert dense.attend_step(q.clone().requires_grad_(), k, v, mask(), None, 0.0) is None
    assert dense.attend_step(torch.cat([q, q], 2), k, v, mask(), None, 0.0) is None
    # each head has a sink of its own
    sinks = torch.full((HEADS,), 50.0)
    out, _ = paged.attention_forward(LAYER, q, k, v, mask(), s_aux=sinks)
    assert out.abs().max() < 1e-9


def test_later_layers_repeat_the_first_ones_call(monkeypatch):
    """With what they share; a layer of another kind is not given it."""
    repeated = []

    def attend(_, args, options):
        q, k, v, lengths, _, bounds, *_, first = args
        q, k, v = q.view(-1, HEADS // KV_HEADS, DIM), k.view(-1, 1, DIM), v.view(-1, 1, DIM)
        return flash_varlen(q, k, v, bounds, None, seqused_k=lengths, k_start=first, **options)

    def again(_, args, options):
        repeated.append(args[0])
        return attend(_, args, options)

    monkeypatch.setattr(dense, "in_one_call", attend)
    monkeypatch.setattr(dense, "repeat", again)
    short, layers = mask(room=30), [tensors(30), tensors(30)]
    outs = [dense.attend_step(*x, short, None, 0.0) for x in layers]
    assert [x is layers[1][0] for x in repeated] == [True]
    assert torch.equal(outs[1], dense.attend_step(*layers[1], mask(room=30), None, 0.0))
    # another softcap, and a cache with room for more
    for other, softcap in ((layers[1], 5.0), (tensors(40), 0.0)):
        alone = mask(room=other[1].shape[2])
        expected = dense.attend_step(*other, alone, None, softcap)
        assert torch.equal(dense.attend_step(*other, short, None, softcap), expected)
    assert len(repeated) == 1
