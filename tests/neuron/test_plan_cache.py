"""Plans are made once for equal metadata, and never used for metadata that has changed."""

import ctypes
import dataclasses
import gc

import pytest
import torch

from torch_paged_attn.backends import neuron
from torch_paged_attn.backends.neuron import plan
from torch_paged_attn.backends.neuron.plan import PlanCache, _kept, read
from torch_paged_attn.testing import PROBLEMS, assert_accurate, build

# two heads: what changes is the metadata
SMALL = dataclasses.replace(PROBLEMS["llama3_8b/mixed/bf16"], num_heads=2, num_kv_heads=1)


def in_place(tensor):
    tensor -= 1


def data(tensor):
    tensor.data -= 1


def numpy_view(tensor):
    tensor.numpy()[...] -= 1


def raw_pointer(tensor):
    first = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_int32))
    for i in range(tensor.numel()):
        first[i] -= 1


UNSEEN = [data, numpy_view, raw_pointer]  # the version counter stays as it was
WRITES = [in_place, *UNSEEN]


def test_equal_values_are_found_and_the_oldest_forgotten():
    cache, made = PlanCache(2), []

    def make(values, option=0, dtype=None):
        tensor = None if values is None else torch.tensor(values, dtype=dtype)
        return cache((tensor,), option, lambda: made.append(values) or len(made))

    assert make([1, 2]) == make([1, 2]) == 1
    assert make([1, 3]) == 2 and make([[1, 2]]) == 3  # other values, another shape
    assert make([1, 3]) == 2 and make([1, 2]) == 4  # the first was the oldest
    assert make([1, 2], option=1) == 5 and make(None) == 6
    assert make([0]) == 7 and make([0], dtype=torch.float64) == 8
    cache.clear()
    assert make([0]) == 9


@pytest.mark.parametrize("write", WRITES)
def test_metadata_is_read_every_time(write):
    tensor = torch.tensor([1, 2, 3], dtype=torch.int32)
    first = read(tensor)
    write(tensor)
    assert read(tensor).tolist() == [0, 1, 2] and first.tolist() == [1, 2, 3]


@pytest.mark.parametrize("write", UNSEEN)
def test_kept_metadata_is_trusted(write):
    tensor = torch.tensor([1, 2, 3], dtype=torch.int32)
    with neuron.keep_plans():
        first = read(tensor)
        write(tensor)
        with neuron.keep_plans():
            assert read(tensor) is first and first.tolist() == [1, 2, 3]
        in_place(tensor)
        assert read(tensor).tolist() == [-1, 0, 1]
    assert read(tensor) is not read(tensor)


def test_copies_die_with_their_tensors():
    with neuron.keep_plans():
        copies, tensor = _kept.get(), torch.tensor([1])
        read(tensor)
        assert len(copies._copies) == 1
        del tensor
        gc.collect()
        assert not copies._copies
        with torch.inference_mode():
            tensor = torch.tensor([4])
        read(tensor)
        assert not copies._copies  # it has no version to trust


def test_layers_of_a_step_share_one_plan(run, machine, monkeypatch):
    call = build(SMALL)
    calls = []
    monkeypatch.setattr(plan, "plan_cache", PlanCache(4))
    build_lists = plan.build_work_lists
    counted = lambda *args: calls.append(args) or build_lists(*args)  # noqa: E731
    monkeypatch.setattr(plan, "build_work_lists", counted)
    truth = call.truth()
    for _ in range(3):
        assert_accurate(*run(call), truth)
    assert len(calls) == 1
    call.args["block_table"].copy_(call.args["block_table"].clone())
    run(call)
    assert len(calls) == 1  # written, not changed


@pytest.mark.parametrize("write", WRITES)
def test_attention_follows_metadata_however_it_is_written(write, run, machine):
    call = build(SMALL)
    run(call)
    write(call.args["seqused_k"][:1])
    assert_accurate(*run(call), call.truth())


def test_kept_plans_follow_versions(run, machine):
    call = build(SMALL)
    expected = run(call)
    with neuron.keep_plans():
        for _ in range(2):
            assert all(torch.equal(x, y) for x, y in zip(run(call), expected, strict=True))
        call.args["seqused_k"][0] -= 1
        assert_accurate(*run(call), call.truth())
