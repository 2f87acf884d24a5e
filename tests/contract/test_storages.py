"""A tensor whose storage was freed, as FSDP does with gathered parameters, or cut is refused by
name: each tensor of every operator, before anything is read or written.
"""

import pytest
import torch
from right_calls import cached, ints, packed, paged, sparse, split, states

import torch_paged_attn

Q8 = {name: torch.tensor(1.0) for name in ("q_descale", "k_descale", "v_descale")}


def scores():
    """What a call of 7 queries of 4 heads, 9 keys and values of 6 may be given besides."""
    return {
        "attn_bias": torch.randn(4, 7, 9),
        "alibi_slopes": torch.randn(2, 4),
        "sinks": torch.randn(4),
        "rng_state": torch.tensor([1, 2]),
        "tail_mask": torch.ones(7, 7, dtype=torch.bool),
        "q_position": ints(1, 3),
    }


def with_options(args):
    args |= scores() | {name: torch.rand(2, 2) for name in Q8} | {"dropout_p": 0.5}
    args |= {"out_dtype": torch.float8_e5m2, "out_scale": torch.tensor(1.0)}
    return args | {"q_latent": torch.randn(7, 4, 6)}


def with_ranges(args):
    return args | {"k_start": ints(0, 4), "seqused_k": ints(4, 5)}


def backward(op, args):
    out, lse = getattr(torch_paged_attn, op)(**args)
    args |= {"out": out, "softmax_lse": lse, "dout": torch.randn(out.shape)}
    return args | {"dlse": torch.randn(lse.shape)}


def written(args):
    eight_bits = {n: x.to(torch.int8) for n, x in args.items() if n.endswith("cache")}
    return args | eight_bits | {"k_scale": torch.rand(2), "v_scale": torch.rand(2)}


def merged():
    call = states()
    out, lse = torch_paged_attn.merge_states(**call)
    results = {"out": out, "softmax_lse": lse}
    return call | results | {"dout": torch.randn(out.shape), "dlse": torch.randn(lse.shape)}


# operators, and calls that give each tensor of theirs at least once
CALLS = {
    "packed": ("flash_varlen", lambda: with_ranges(with_options(packed()))),
    "paged": ("flash_varlen", lambda: with_options(paged())),
    "sparse": ("blocksparse", lambda: with_ranges(with_options(sparse()))),
    "sparse_paged": (
        "blocksparse",
        lambda: with_options({**sparse(), **paged(), "causal": True}),
    ),
    "packed_backward": (
        "flash_varlen_backward",
        lambda: backward("flash_varlen", with_ranges(packed() | scores())),
    ),
    "sparse_backward": (
        "blocksparse_backward",
        lambda: backward("blocksparse", with_ranges(sparse() | scores())),
    ),
    "write": ("reshape_and_cache", lambda: written(cached())),
    "split_write": ("reshape_and_cache.split", lambda: written(split())),
    "merge": ("merge_states", states),
    "merge_backward": ("merge_states_backward", merged),
}
LISTS = {"outs": [torch.randn(3, 2, 4)] * 3, "lses": [torch.randn(2, 3)] * 3}


def operator(op):
    packet, _, overload = op.partition(".")
    return getattr(getattr(torch.ops.paged_attn, packet), overload or "default")


def cut(tensor, held):
    """The tensor, 3 elements into a storage that now holds `held` of the bytes it needs."""
    room = torch.zeros(3 + tensor.numel(), dtype=tensor.dtype)
    found = room[3:].view(tensor.shape).copy_(tensor)
    needed = room.untyped_storage().nbytes()
    room.untyped_storage().resize_(held(needed))
    return found, needed


BACKED = "backed by a storage of at least {} bytes, got a storage of"
HELD = {"freed": lambda needed: 0, "a_byte_short": lambda needed: needed - 1}


def refused(op, args, text):
    with pytest.raises(ValueError) as caught:
        operator(op)(**args)
    stem = op.partition(".")[0]
    assert str(caught.value) == f"{stem}(): expected {text}"


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("name", CALLS)
def test_each_tensor_must_have_its_storage(name, held):
    op, make = CALLS[name]
    args = make()
    operator(op)(**args)
    caches = [n for n in args if n.endswith("cache")]
    before = {n: args[n].clone() for n in caches}
    for argument, tensor in args.items():
        if isinstance(tensor, torch.Tensor):
            found, needed = cut(tensor, HELD[held])
            text = f"{argument} to be {BACKED.format(needed)} {HELD[held](needed)} bytes"
            refused(op, args | {argument: found}, text)
    for n in caches:
        assert torch.equal(args[n], before[n])


@pytest.mark.parametrize("argument", LISTS)
def test_each_part_of_a_list_must_have_its_storage(argument):
    for i, tensor in enumerate(LISTS[argument]):
        parts = list(LISTS[argument])
        parts[i], needed = cut(tensor, HELD["freed"])
        text = f"{argument}[{i}] to be {BACKED.format(needed)} 0 bytes"
        refused("merge_states.list", LISTS | {argument: parts}, text)


def test_the_calls_give_every_tensor():
    for op in {op for op, _ in CALLS.values()}:
        schema = operator(op)._schema
        wanted = {a.name for a in schema.arguments if "Tensor" in str(a.type)}
        calls = [make() for other, make in CALLS.values() if other == op]
        tensors = {n for args in calls for n, x in args.items() if isinstance(x, torch.Tensor)}
        assert wanted == tensors


def test_what_a_tensor_does_not_reach_may_be_gone():
    args = packed()
    expected = torch_paged_attn.flash_varlen(**args)
    # strides of 0, nothing at all, and a view that ends before the cut
    args["k"] = args["k"].as_strided((9, 2, 8), (16, 8, 1))
    room = torch.cat([args["v"].flatten(), torch.zeros(50)])
    args["v"] = room[: args["v"].numel()].view(args["v"].shape)
    room.untyped_storage().resize_(args["v"].numel() * 4)
    bias = torch.zeros(1)
    args["attn_bias"] = bias.expand(1, 7, 9)
    got = torch_paged_attn.flash_varlen(**args)
    assert torch.equal(got[0], expected[0])
    empty = packed() | {name: torch.empty(0, *packed()[name].shape[1:]) for name in "qkv"}
    empty |= {"cu_seqlens_q": ints(0, 0), "cu_seqlens_k": ints(0, 0)}
    for name in "qkv":
        empty[name].untyped_storage().resize_(0)
    assert torch_paged_attn.flash_varlen(**empty)[0].shape == (0, 4, 6)


def test_parameters_freed_between_forward_and_backward():
    args = packed()
    args["q"].requires_grad_()
    out, _ = torch_paged_attn.flash_varlen(**args)
    args["k"].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"flash_varlen_backward\(\): expected k to be backed"):
        out.sum().backward()
