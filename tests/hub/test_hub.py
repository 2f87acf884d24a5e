"""Unmodified Hugging Face programs on our functions, by the variable LOCAL_KERNELS alone.

In an environment of its own (`make test-hub`): Transformers 5.17 with kernels 0.16; no kernels that
Transformers 5.23 takes is on PyPI yet.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys, json
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, bos_token_id=None,
)
torch.manual_seed(0)
model = LlamaForCausalLM._from_config(config, attn_implementation=sys.argv[1]).eval()
prompts = [[1, 2, 3, 4, 5], [7, 8], list(range(20, 40))]
greedy = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
if sys.argv[2] == "batch":
    paging = ContinuousBatchingConfig(block_size=16, num_blocks=16, max_batch_tokens=64)
    results = model.generate_batch(
        prompts, generation_config=greedy, continuous_batching_config=paging
    )
    answers = [result.generated_tokens for result in results.values()]
else:
    answers = []
    for prompt in prompts:
        tokens = model.generate(torch.tensor([prompt]), generation_config=greedy)
        answers.append(tokens[0, len(prompt):].tolist())
ours = "torch_paged_attn" in sys.modules
print("ANSWER", json.dumps([answers, ours]))
"""


def run(implementation, way, **environment):
    command = [sys.executable, "-c", PROGRAM, implementation, way]
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stderr[-2000:]
    return json.loads(lines[-1].removeprefix("ANSWER "))


@pytest.fixture(scope="module")
def local_kernels():
    command = [sys.executable, "-m", "torch_paged_attn", "hub"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def expected():
    answers, ours = run("eager", "generate")
    assert not ours
    return answers


@pytest.mark.parametrize("name", ["flash_attention_2", "torch-paged-attn/flash-attn2"])
@pytest.mark.parametrize("way", ["generate", "batch"])
def test_a_program_runs_on_ours(name, way, local_kernels, expected):
    answers, ours = run(name, way, LOCAL_KERNELS=local_kernels)
    assert ours and answers == expected


def test_without_the_variable_there_is_none():
    with pytest.raises(AssertionError, match="flash"):
        run("flash_attention_2", "generate")
