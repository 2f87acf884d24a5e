"""One process of torch_xla whose runtime says NEURON: prints what it finds as one JSON object.

The tensors are torch_xla's own, on its CPU runtime. `nki` is a fake: a launch runs the kernel on
the emulator and answers with new tensors, as a lazy launch does, and leaves its arguments alone.
"""

import json
import os
import sys
import types
from pathlib import Path

os.environ["PJRT_DEVICE"] = "CPU"
os.environ["PAGED_ATTN_NEURON_EMULATE"] = "1"  # the kernels are written in the emulator's nki

os.environ["NEURON_LOGICAL_NC_CONFIG"] = "1"

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import torch
import torch_xla
from nki_emulator import front_ends
from torch.utils._pytree import tree_map_only

from torch_paged_attn import environment, reference
from torch_paged_attn.testing import PROBLEMS, build

torch_xla.runtime.device_type = lambda: "NEURON"
sys.modules["neuronxcc"] = types.ModuleType("neuronxcc")
sys.modules["nki"] = front_ends.fake("nki", [])

from torch_paged_attn.backends.neuron import BACKEND, runtime  # noqa: E402
from torch_paged_attn.ops.backend import serving  # noqa: E402

environment.NEURON_EMULATE = False
ops = torch.ops.paged_attn


def lazily(kernel):
    """What `nki.jit` makes of a kernel: `kernel[cores](...)` on XLA tensors."""

    def call(*args):
        assert all(a.device.type == "xla" for a in args if isinstance(a, torch.Tensor))
        copies = tree_map_only(torch.Tensor, lambda a: a.cpu().clone(), args)
        return tree_map_only(torch.Tensor, lambda a: a.to("xla"), runtime._emulate(kernel, copies))

    return {1: call}


sys.modules["nki"].jit = lazily


def on_xla(tree):
    return tree_map_only(torch.Tensor, lambda a: a.to("xla"), tree)


found = {"backend": serving("XLA")[0].name}

for name in (
    "llama3_8b/mixed/bf16",
    "llama3_8b/mixed/kv_e4m3",
    "phi3_small/local_strided/bf16",
    "t5/bias/f32",
    "training/dropout/f32",
    "gpt_oss/sinks_window/bf16",
    "llama3_8b/prefill/out_e4m3",
):
    call = build(PROBLEMS[name])
    args = {"cu_seqlens_k": None, "max_seqlen_q": 0, "max_seqlen_k": 0} | call.args
    environment.NEURON_EMULATE = True
    expected = BACKEND.function(call.op)(**args)
    environment.NEURON_EMULATE = False
    results = getattr(ops, call.op)(**on_xla(args))
    found[name] = all(
        x.device.type == "xla" and torch.equal(x.cpu().float(), y.float())
        for x, y in zip(results, expected, strict=True)
    )

torch.manual_seed(0)
key, value, slots = torch.randn(150, 3, 8), torch.randn(150, 3, 8), torch.randperm(200)[:150]
slots[::7] = -1
caches = {
    "one tensor": lambda: torch.ones(2, 40, 3, 5, 8),
    "slots before heads": lambda: torch.ones(2, 40, 5, 3, 8).transpose(2, 3),
    "keys beside values": lambda: torch.ones(40, 2, 3, 5, 8).transpose(0, 1),
    "eight bits": lambda: torch.ones(2, 40, 3, 5, 8).to(torch.float8_e4m3fn),
}
for name, make in caches.items():
    expected, written = make(), make().to("xla")
    reference.reshape_and_cache(key, value, expected, slots)
    ops.reshape_and_cache(*on_xla((key, value)), written, slots.to("xla"))
    found[f"cache: {name}"] = torch.equal(expected.float(), written.cpu().float())
print("FOUND", json.dumps(found))
