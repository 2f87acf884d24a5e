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
    # a document's first token is nobody's label
    labels = row.masked_fill(positions == 0, -100)
    return model(row, position_ids=positions, labels=labels, use_cache=False).loss


def gradients(model, loss):
    loss(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind, config", [(LlamaForCausalLM, LLAMA), (GptOssForCausalLM, GPT_OSS)])
def test_a_model_has_the_gradients_of_eager_attention(kind, config):
    expected = gradients(model_of(kind, config, "eager"), eager_loss)
    got = gradients(model_of(kind, config, paged.NAME), packed_loss)
    assert any("sinks" in name for name in got) == (kind is GptOssForCausalLM)
    for name, gradient in got.items():
        torch.testing.assert_close(
            gradient, expected[name], msg=lambda text, n=name: f"{n}: {text}"
        )


def test_functional_call_differentiates_a_model():
    model = model_of(LlamaForCausalLM, LLAMA, paged.NAME)
    parameters = dict(model.named_parameters())
    row = documents()[2][None]

    def loss(given):
        return torch.func.functional_call(
            model, given, (row,), {"labels": row, "use_cache": False}
        ).loss

    got = torch.func.grad(loss)(parameters)
    expected = torch.autograd.grad(loss(parameters), list(parameters.values()))
    for a, b in zip(got.values(), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_trainer_reaches_the_loss_of_eager_attention(tmp_path):
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in documents() * 4]

    def collate(batch):
        longest = max(len(row["input_ids"]) for row in batch)
        pad = lambda x, value: x + [value] * (longest - len(x))  # noqa: E731
        ids = torch.tensor([pad(row["input_ids"], 0) for row in batch])
        labels = torch.tensor([pad(row["labels"], -100) for row in batch])
        return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}

    def train(attention):
        model = model_of(LlamaForCausalLM, LLAMA, attention)
        if attention == paged.NAME:
            model.gradient_checkpointing_enable()
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            max_steps=6,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        result = Trainer(model, arguments, data_collator=collate, train_dataset=rows).train()
        return result.training_loss

    assert train(paged.NAME) == pytest.approx(train("eager"), abs=1e-3)


def test_fsdp_on_two_processes(tmp_path):
    program = Path(__file__).with_name("fsdp_program.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "STORE": str(tmp_path / "store")}
    command = [sys.executable, str(program)]
    ranks = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        out, error = process.communicate(timeout=240)
        assert process.returncode == 0 and "equal to one process" in out, error[-2000:]
