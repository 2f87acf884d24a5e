"""`PAGED_ATTN_NEURON_EMULATE=1`: CPU tensors go through the dispatcher to the Neuron kernels."""

import json
from pathlib import Path

import pytest

import torch_paged_attn

ROOT = Path(torch_paged_attn.__file__).parent.parent
PATHS = str(ROOT), str(ROOT / "tools")  # the emulator is under tools/
REPORT = """
import runpy, sys
sys.argv = ["torch_paged_attn", "--json"]
runpy.run_module("torch_paged_attn", run_name="__main__")
"""


@pytest.fixture
def emulated(forks):
    return lambda code: forks.run(code, *PATHS, PAGED_ATTN_NEURON_EMULATE="1")


def test_the_report_says_who_answers(emulated):
    cpu = json.loads(emulated(REPORT))["devices"]["cpu"]
    assert cpu["backend"] == "neuron" and cpu["reason"] is None
    assert {"flash_varlen", "blocksparse", "reshape_and_cache.split"} <= set(cpu["ops"])


CALLS = """
import torch, torch_paged_attn
q, bounds = torch.ones(6, 4, 16), torch.tensor([0, 2, 6], dtype=torch.int32)
for _ in range(2):
    try:
        torch_paged_attn.flash_varlen(q, q, q, bounds)
    except NotImplementedError as error:
        print(error)
"""


def test_without_the_emulator_no_call_is_answered_by_another_backend(forks):
    without = {"PAGED_ATTN_NEURON_EMULATE": "1"}
    first, second = forks.run(CALLS, PATHS[0], **without).splitlines()
    assert first == second and "nki_emulator cannot be imported" in first
    cpu = json.loads(forks.run(REPORT, PATHS[0], **without))["devices"]["cpu"]
    assert cpu["backend"] is None and "nki_emulator cannot be imported" in cpu["reason"]


MODEL = """
import torch, transformers
from torch_paged_attn.integrations import transformers as paged
from nki_emulator.machine import machine

paged.register()
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    initializer_range=0.6, bos_token_id=None, eos_token_id=None, pad_token_id=0)
build = transformers.LlamaForCausalLM._from_config
eager = build(config, attn_implementation="eager").eval()
ours = build(config, attn_implementation=paged.NAME).eval()
ours.load_state_dict(eager.state_dict())
prompt = torch.randint(1, 97, (2, 9))
new = [m.generate(prompt, max_new_tokens=6, do_sample=False).tolist() for m in (eager, ours)]
launched = sum(n for (engine, _), n in machine().instructions.items() if engine == "tensor")
print(new[0] == new[1], launched > 0)
"""


@pytest.mark.device_suite  # a compiled step goes the same way
def test_a_model_generates_the_same_tokens(emulated):
    pytest.importorskip("transformers")
    assert emulated(MODEL).split() == ["True", "True"]


COMPILED = """
import torch, torch_paged_attn as tpa
q, k = torch.randn(9, 4, 16), torch.randn(9, 2, 16)
bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
cache = torch.zeros(2, 4, 2, 8, 16)

def step(q, k, cache):
    tpa.reshape_and_cache(k, k, cache, torch.arange(9))
    out, lse = tpa.flash_varlen(q, k, k, bounds, causal=True)
    return 2 * tpa.merge_states(out, lse, out, lse)[0]

found = torch.compile(step, backend="aot_eager", fullgraph=True)(q, k, cache)
written = cache.clone()
print(torch.equal(found, step(q, k, cache.zero_())) and torch.equal(written, cache))
print(bool(written.any()))
"""


def test_a_compiled_step_gives_the_same_bits(emulated):
    assert emulated(COMPILED).split() == ["True", "True"]
