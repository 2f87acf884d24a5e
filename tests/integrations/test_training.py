"""Models train on the ops: Trainer, FSDP2, functional_call, beside eager attention."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from torch_paged_attn.integrations import transformers as paged
from torch_paged_attn.testing import assert_as_right_as

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LLAMA = LlamaConfig(**SIZES)
# sinks, and every other layer with a window
GPT_OSS = GptOssConfig(
    **SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=6
)
LENGTHS = (3, 1, 17, 9)


@pytest.fixture(autouse=True)
def registered():
    paged.register()


def model_of(kind, config, attention):
    torch.manual_seed(0)
    return kind._from_config(copy.deepcopy(config), attn_implementation=attention).train()


def golden_of(kind, config):
    """The same model in float64, on eager attention."""
    model = model_of(kind, config, "eager").double()
    if kind is GptOssForCausalLM:  # torch has no grouped_mm of float64
        model.set_experts_implementation("eager")
    return model


def assert_all_as_right_as(ours, golden, peer):
    """`assert_as_right_as` of tensors by their names."""
    assert ours.keys() == golden.keys() == peer.keys()
    for name, tensor in ours.items():
        try:
            assert_as_right_as(tensor, golden[name], peer[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def documents():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (length,), generator=generator) for length in LENGTHS]


def eager_loss(model):
    """The mean loss of every document by itself."""
    losses = [
        model(row[None], labels=row[None]).loss * (len(row) - 1)
        for row in documents()
        if len(row) > 1
    ]
    return sum(losses) / sum(length - 1 for length in LENGTHS)


def packed_loss(model):
    row = torch.cat(documents())[None]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    # a document's first token is no label
    labels = row.masked_fill(positions == 0, -100)
    return model(row, position_ids=positions, labels=labels, use_cache=False).loss


def gradients(model, loss):
    loss(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind, config", [(LlamaForCausalLM, LLAMA), (GptOssForCausalLM, GPT_OSS)])
def test_a_model_has_the_gradients_of_eager_attention(kind, config):
    golden = gradients(golden_of(kind, config), eager_loss)
    eager = gradients(model_of(kind, config, "eager"), eager_loss)
    got = gradients(model_of(kind, config, paged.NAME), packed_loss)
    assert any("sinks" in name for name in got) == (kind is GptOssForCausalLM)
    assert_all_as_right_as(got, golden, eager)


def test_functional_call_differentiates_a_model():
    model = model_of(LlamaForCausalLM, LLAMA, paged.NAME)
    row = documents()[2][None]

    def loss(model):
        return model(row, labels=row, use_cache=False).loss

    def functional_loss(given):
        return torch.func.functional_call(
            model, given, (row,), {"labels": row, "use_cache": False}
        ).loss

    golden = gradients(golden_of(LlamaForCausalLM, LLAMA), loss)
    got = torch.func.grad(functional_loss)(dict(model.named_parameters()))
    assert_all_as_right_as(got, golden, gradients(model, loss))


def test_trainer_reaches_the_parameters_of_eager_attention(tmp_path):
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in documents() * 4]

    def collate(batch):
        longest = max(len(row["input_ids"]) for row in batch)
        pad = lambda x, value: x + [value] * (longest - len(x))  # noqa: E731
        ids = torch.tensor([pad(row["input_ids"], 0) for row in batch])
        labels = torch.tensor([pad(row["labels"], -100) for row in batch])
        return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}

    def train(model):
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            max_steps=6,
            # Adam's steps follow signs, which a rounding turns where a gradient is next to none
            optim="sgd",
            learning_rate=1.0,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(model, arguments, data_collator=collate, train_dataset=rows).train()
        return dict(model.named_parameters())

    ours = model_of(LlamaForCausalLM, LLAMA, paged.NAME)
    ours.gradient_checkpointing_enable()
    golden = train(golden_of(LlamaForCausalLM, LLAMA))
    assert_all_as_right_as(train(ours), golden, train(model_of(LlamaForCausalLM, LLAMA, "eager")))


def test_fsdp_on_two_processes(tmp_path):
    program = Path(__file__).with_name("fsdp_program.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "STORE": str(tmp_path / "store")}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("equal to one process") == 2
