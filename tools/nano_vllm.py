"""nano-vLLM's source, as it is, on a CPU: its attention is ours by flash-attn's names.

    git clone https://github.com/GeeeekExplorer/nano-vllm
    TRITON_INTERPRET=1 PYTHONPATH=. python tools/nano_vllm.py nano-vllm

Prints the tokens of a small Qwen3 of random weights, and whether they are those of Transformers.

No line of nano-vLLM changes. What attention needs is `flash_attn.install()`. The rest of it wants a
GPU: its Triton kernel that writes the cache runs in Triton's interpreter, and `on_cpu` puts gloo in
NCCL's place, torch's functions on GPUs away, and a fixed number of bytes in the place of free
memory. CUDA graphs are off (`enforce_eager`).
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its layers are compiled for a GPU

import torch
import torch.distributed
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from torch_paged_attn.integrations import flash_attn

BYTES = 1 << 26
PROMPTS = [[1, 2, 3, 4, 5], list(range(10, 40)), [7] * 300, [*[7] * 280, 9, 11]]
NEW_TOKENS = 12


def on_cpu() -> None:
    """Let code that says "cuda" run where there is none."""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **options: make(*args, **options)

    join, default_device = torch.distributed.init_process_group, torch.set_default_device
    torch.distributed.init_process_group = lambda _, *args, **options: join(
        "gloo", *args, **options
    )
    torch.set_default_device = lambda device: default_device("cpu")
    torch.tensor = without_pinning(torch.tensor)
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize"):
        setattr(torch.cuda, name, nothing)
    torch.cuda.mem_get_info = lambda *_: (BYTES, BYTES)
    peaks = {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0}
    torch.cuda.memory_stats = lambda *_: peaks  # type: ignore[assignment]


def save_model(folder: str) -> Qwen3ForCausalLM:
    """A small model of random weights, and a tokenizer for it."""
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        attention_bias=False,
        tie_word_embeddings=False,
        dtype="bfloat16",  # its norms write into what they are given where that is float32
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w127").save_pretrained(folder)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a folder with nano-vLLM's source")
    asked = parser.parse_args()
    sys.path.insert(0, asked.source)
    flash_attn.install()
    on_cpu()
    from nanovllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model = save_model(folder)
        # it refuses greedy decoding; at this temperature the largest logit wins
        params = SamplingParams(temperature=1e-6, max_tokens=NEW_TOKENS, ignore_eos=True)
        engine = LLM(folder, enforce_eager=True, max_model_len=512, max_num_batched_tokens=1024)
        answers = engine.generate(PROMPTS, params, use_tqdm=False)
    same = True
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            wanted = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )[0, len(prompt) :].tolist()
        same &= wanted == answer["token_ids"]
        print(answer["token_ids"], "as" if wanted == answer["token_ids"] else "not as", wanted)
    print("the tokens of Transformers" if same else "other tokens than those of Transformers")
    sys.exit(not same)


if __name__ == "__main__":
    main()
