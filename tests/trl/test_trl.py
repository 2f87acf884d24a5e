"""TRL's SFTTrainer on our attention: `padding_free` lays a batch end to end, and only positions say
where a document begins.

Golden is TRL with padding and eager attention in float64, and what SDPA is off by in float32 is
what ours may be off by.
"""

import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from torch_paged_attn.integrations import transformers as paged
from torch_paged_attn.testing import assert_as_right_as, assert_batch_invariant

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))

from invariant_program import make_model

WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(62))]


def tokenizer():
    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0")
    found = Tokenizer(words)
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>")


def documents(count):
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 90, (count,), generator=draw).tolist()
    return [torch.randint(2, 64, (n,), generator=draw).tolist() for n in lengths]


def trained(folder, attention, dtype=torch.float32, **options):
    """All weights after some steps, and how many rows the largest batch had."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    config = LlamaConfig(**sizes, **heads, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention).to(dtype)
    rows = []
    model.register_forward_pre_hook(
        lambda _, args, given: rows.append(len(given["input_ids"])), with_kwargs=True
    )
    arguments = SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=5, optim="sgd",
        learning_rate=1.0, report_to=[], save_strategy="no", use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_tqdm=True, max_length=None, seed=0, **options,
    )  # fmt: skip
    texts = [" ".join(WORDS[i] for i in document) for document in documents(24)]
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
    )
    trainer.train()
    return torch.cat([x.detach().flatten() for x in model.parameters()]), max(rows)


@pytest.mark.parametrize("padding_free", (False, True))
def test_training_is_as_right_as_with_sdpa(padding_free, tmp_path):
    paged.register()
    golden, _ = trained(tmp_path, "eager", torch.float64)
    peer, _ = trained(tmp_path, "sdpa", padding_free=padding_free)
    found, rows = trained(tmp_path, paged.NAME, padding_free=padding_free)
    assert rows == (1 if padding_free else 4)
    assert_as_right_as(found, golden, peer)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_bits_do_not_depend_on_the_documents_of_a_row(dtype, monkeypatch):
    """With `batch_invariant`, and linear layers that compute blocks of fixed size."""
    from torch_paged_attn import environment

    monkeypatch.setattr(environment, "BATCH_INVARIANT", True)
    paged.register()
    model = make_model(dtype)
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)

    def logits(batch):
        given = collate([{"input_ids": document} for document in batch])
        del given["labels"]
        with torch.no_grad():
            row = model(**given, use_cache=False).logits[0]
        return list(row.split([len(document) for document in batch]))

    assert_batch_invariant(logits, documents(6))
