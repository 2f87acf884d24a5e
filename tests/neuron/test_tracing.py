"""torch.compile on Neuron's native device: which ops a graph holds as launches, which as one node.

The device is PrivateUse1 renamed, its tensors are fake, and `wrap_nki` makes a node of a launch as
`torch_neuronx.nki_hop` is documented to; so this is what is traced, not what Neuron makes of it.
"""

import json
from pathlib import Path

import pytest

import torch_paged_attn

ROOT = Path(torch_paged_attn.__file__).parent.parent
PATHS = str(ROOT), str(ROOT / "tools")  # the fakes are the emulator's

SESSION = """
import json, os, sys, types
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from nki_emulator.front_ends import fake

_setup_privateuseone_for_python_backend("neuron")

@torch.library.custom_op("front_end::launch", mutates_args={"target"})
def launch(rows: torch.Tensor, index: torch.Tensor, target: torch.Tensor) -> None:
    raise AssertionError("only traced")

launch.register_fake(lambda rows, index, target: None)

class Caller:
    def __getitem__(self, grid):
        assert tuple(map(int, grid)) == (2,)
        return self
    def __call__(self, rows, index, target, num_kv_heads, layout):
        torch.ops.front_end.launch(rows, index, target)
        return target

hop = fake("torch_neuronx.nki_hop", [])
hop.wrap_nki = lambda kernel: Caller()
sys.modules |= {
    "nki": fake("nki", []), "neuronxcc": types.ModuleType("neuronxcc"),
    "torch_neuronx": types.ModuleType("torch_neuronx"), "torch_neuronx.nki_hop": hop}

import torch_paged_attn as tpa

def nodes(step, *arguments):
    graph = make_fx(dispatch_functionalize(step), tracing_mode="fake")(*arguments)
    found = []
    for node in graph.graph.nodes:
        name = str(node.target)
        if "auto_functionalized" in name:
            name = str(node.args[0])
        if name.startswith(("paged_attn", "front_end")):
            found.append(name)
    return found

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="neuron")

def write(key, k_cache, v_cache, slots):
    tpa.reshape_and_cache(key, key, (k_cache, v_cache), slots)

found = {}
with FakeTensorMode():
    key, slots = empty(9, 2, 16), empty(9, dtype=torch.int64)
    both = empty(2, 4, 2, 8, 16)
    one = lambda key, cache, slots: tpa.reshape_and_cache(key, key, cache, slots)
    found["one tensor"] = nodes(one, key, both, slots)
    found["two tensors"] = nodes(write, key, empty(4, 2, 8, 16), empty(4, 2, 8, 16), slots)
    nhd = [empty(4, 8, 2, 16).transpose(1, 2) for _ in "kv"]
    found["slots before heads"] = nodes(write, key, *nhd, slots)
    bytes_ = [empty(4, 2, 8, 16, dtype=torch.float8_e4m3fn) for _ in "kv"]
    found["eight bits"] = nodes(write, key, *bytes_, slots)
    beside = empty(4, 2, 8, 2, 16)
    found["keys beside values"] = nodes(
        lambda key, cache, slots: write(key, *cache.transpose(2, 3).unbind(1), slots),
        key, beside, slots)
    q, bounds = empty(9, 4, 16), empty(3, dtype=torch.int32)
    found["attention"] = nodes(
        lambda q, k, bounds: tpa.flash_varlen(q, k, k, bounds, causal=True)[0], q, key, bounds)
    out, lse = empty(9, 4, 16), empty(4, 9, dtype=torch.float32)
    found["merge"] = nodes(lambda o, l: tpa.merge_states(o, l, o, l)[0], out, lse)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(forks):
    return json.loads(forks.run(SESSION, *PATHS, PAGED_ATTN_NEURON_EMULATE="0"))


@pytest.mark.parametrize("case", ["one tensor", "two tensors", "slots before heads", "eight bits"])
def test_a_cache_write_is_two_launches(case, found):
    assert found[case] == ["front_end.launch.default"] * 2


def test_what_cannot_be_inverted_stays_one_node(found):
    assert found["keys beside values"] == ["paged_attn.reshape_and_cache.split"]


def test_attention_stays_one_node_and_merging_is_arithmetic(found):
    assert found["attention"] == ["paged_attn.flash_varlen.default"]
    assert found["merge"] == []
