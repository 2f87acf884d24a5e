"""Plans are made once for equal metadata, and never for metadata that has changed."""

import gc

import torch

from torch_paged_attn.backends.neuron import plan
from torch_paged_attn.backends.neuron.plan_cache import HostCopies, Recent
from torch_paged_attn.testing import PROBLEMS, assert_accurate, build


def test_equal_contents_are_found_again_and_the_oldest_forgotten():
    recent, made = Recent(2), []

    def make(values, option=0):
        tensor = None if values is None else torch.tensor(values)
        return recent((tensor,), option, lambda: made.append(values) or len(made))

    assert make([1, 2]) == make([1, 2]) == 1
    assert make([1, 3]) == 2 and make([[1, 2]]) == 3  # other values, another shape
    assert make([1, 3]) == 2 and make([1, 2]) == 4  # the first was the oldest
    assert make([1, 2], option=1) == 5 and make(None) == 6


def test_copies_follow_changes_and_die_with_their_tensors():
    copies, tensor = HostCopies(), torch.tensor([1, 2, 3])
    first = copies.copy_of(tensor)
    assert copies.copy_of(tensor) is first and copies(tensor) is tensor
    tensor[0] = 7
    assert copies.copy_of(tensor).tolist() == [7, 2, 3] and first.tolist() == [1, 2, 3]
    del tensor
    gc.collect()
    assert not copies._copies
    with torch.inference_mode():
        unversioned = torch.tensor([4])
    copies.copy_of(unversioned)
    unversioned_copy = copies.copy_of(unversioned)
    assert unversioned_copy.tolist() == [4] and not copies._copies


def test_layers_of_a_step_share_one_plan(run, machine, monkeypatch):
    call = build(PROBLEMS["llama3_8b/mixed/bf16"])
    calls = []
    monkeypatch.setattr(plan, "_recent_plans", Recent(4))
    make = plan._make
    monkeypatch.setattr(plan, "_make", lambda *args: calls.append(args) or make(*args))
    truth = call.truth()
    for _ in range(3):
        assert_accurate(*run(call), truth)
    assert len(calls) == 1
    call.args["block_table"].copy_(call.args["block_table"].clone())
    run(call)
    assert len(calls) == 1  # written, not changed
    call.args["seqused_k"][0] -= 1
    assert_accurate(*run(call), call.truth())
    assert len(calls) == 2
