"""Wrong calls: each has its named error, eagerly and (where metadata says it) under FakeTensor."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from wrong_calls import BASES, STATIC, VALUES, cached

import torch_paged_attn


def overload(name):
    packet, _, over = name.partition(".")
    return getattr(getattr(torch.ops.paged_attn, packet), over or "default")


def raises(op, args, error, text):
    """The error, its exact type, and its text after the op's name."""
    with pytest.raises(error) as caught:
        overload(op)(**args)
    assert caught.type is error
    message = str(caught.value)
    assert message.startswith(f"paged_attn::{op.partition('.')[0]}: "), message
    assert text in message
    assert "; allowed: " in message
    return message


def ids(cases):
    return [f"{base}-{'-'.join(changes)}-{i}" for i, (base, changes, *_) in enumerate(cases)]


@pytest.mark.parametrize("base", BASES)
def test_the_calls_that_the_table_changes_are_right(base):
    op, make = BASES[base]
    overload(op)(**make())


@pytest.mark.parametrize("base, changes, text", STATIC, ids=ids(STATIC))
def test_metadata(base, changes, text):
    op, make = BASES[base]
    args = make() | changes
    before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor)}
    eager = raises(op, args, ValueError, text)
    for name, tensor in before.items():
        assert torch.equal(args[name], tensor), f"{name} changed"
    with FakeTensorMode() as mode:
        fakes = {
            k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in args.items()
        }
        assert raises(op, fakes, ValueError, text) == eager


@pytest.mark.parametrize("base, changes, error, text", VALUES, ids=ids(VALUES))
def test_values(base, changes, error, text):
    op, make = BASES[base]
    args = make() | changes
    before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor)}
    with torch.inference_mode():
        raises(op, args, error, text)
    for name, tensor in before.items():
        assert torch.equal(args[name], tensor), f"{name} changed"


@pytest.mark.parametrize("base", BASES)
def test_every_tensor_must_be_on_the_first_tensors_device(base):
    op, make = BASES[base]
    args = make()
    _, *others = [name for name, value in args.items() if isinstance(value, torch.Tensor)]
    for name in others:
        moved = {**args, name: args[name].to("meta")}
        raises(
            op,
            moved,
            ValueError,
            f"{name} is on meta; allowed: the device of the first tensor, cpu",
        )


@pytest.mark.parametrize("base", ["packed", "sparse", "states"])
def test_a_result_that_would_need_a_gradient_is_refused(base):
    op, make = BASES[base]
    args = make()
    first = next(iter(args))
    args[first].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{first} requires grad"):
        overload(op)(**args)
    with torch.no_grad():
        overload(op)(**args)


def test_a_cache_that_would_need_a_gradient_is_refused():
    args = cached()
    args["key"].requires_grad_()
    before = args["kv_cache"].clone()
    with pytest.raises(NotImplementedError, match="key requires grad"):
        overload("reshape_and_cache")(**args)
    assert torch.equal(args["kv_cache"], before)


def test_writing_a_cache_moves_its_version():
    args = cached()
    version = args["kv_cache"]._version
    torch_paged_attn.reshape_and_cache(**args)
    assert args["kv_cache"]._version > version
