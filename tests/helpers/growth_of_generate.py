"""Loops of a small model whose keys grow, for `kernel_counts.counted_in`."""

from unittest import mock

import torch
import transformers
from transformers.cache_utils import QuantizedLayer

from torch_paged_attn.integrations import transformers as paged

SIZES = {
    **{"vocab_size": 97, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    **{"max_position_embeddings": 1024, "pad_token_id": 0},
    **{"bos_token_id": None, "eos_token_id": None},
}
# tokens of a prompt, nearly a tile of keys; of a step with draft tokens
PROMPT, DRAFT = 60, 5


def model(name="Llama", **options):
    paged.register()
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    model_class = getattr(transformers, f"{name}ForCausalLM")
    made = model_class._from_config(config, attn_implementation=paged.NAME, dtype=torch.bfloat16)
    return made.eval()


def generate(cache, steps, padded, window=None):
    """`steps` tokens after a prompt, with a cache of Transformers; a window is longer than that."""
    made = model("Mistral", sliding_window=window) if window else model()
    length = window - 7 if window else PROMPT
    ids, mask = torch.full((2, length), 5), torch.ones(2, length, dtype=torch.long)
    if padded:
        mask[0, :7] = 0
    options = {"cache_implementation": cache, "max_new_tokens": steps, "do_sample": False}
    with torch.inference_mode():
        made.generate(ids, attention_mask=mask, pad_token_id=0, disable_compile=True, **options)


def verify(steps):
    """Steps of draft tokens, as assisted decoding has them."""
    made = model()
    cache = transformers.DynamicCache(config=made.config)
    with torch.inference_mode():
        for step in range(steps):
            made(torch.full((1, DRAFT if step else PROMPT), 5), past_key_values=cache)


class Rounded(QuantizedLayer):
    """A layer of a quantised cache, in 8 bits."""

    def _quantize(self, x, axis):
        scale = x.abs().amax() / 127 + 1e-6
        return (x / scale).round().to(torch.int8), scale

    def _dequantize(self, quantized):
        x, scale = quantized
        return x * scale


def quantised(steps):
    """`steps` tokens after a prompt, with a cache of which all but the last 16 are in 8 bits
    and become new tensors in each step."""
    made = model()
    cache = transformers.Cache(layers=[Rounded(residual_length=16)])
    with torch.inference_mode():
        for step in range(steps):
            made(torch.full((2, 1 if step else PROMPT), 5), past_key_values=cache)


def batches(count):
    """Continuous batching of `count` prompts of growing lengths, each with as many new tokens."""
    from kernel_counts import on_chip
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching import ContinuousBatchingManager as Manager

    loop = Manager._run_generation_loop

    def run(self):  # in a thread of its own
        with on_chip():
            loop(self)

    made = paged.use(model())
    fields = ContinuousBatchingConfig.__dataclass_fields__
    options = {"page_size" if "page_size" in fields else "block_size": 16}
    config = ContinuousBatchingConfig(num_blocks=512, max_batch_tokens=256, **options)
    tokens = GenerationConfig(
        max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None, use_cache=False
    )
    with mock.patch.object(Manager, "_run_generation_loop", run):
        results = made.generate_batch(
            [[5] * (1 + 7 * i) for i in range(count)],
            generation_config=tokens,
            continuous_batching_config=config,
        )
    failed = [x.error for x in results.values() if x.error]
    assert len(results) == count and not failed, failed


def kinds_of_generate(arch, steps):
    """How many kinds of calls the host worked out in `steps` tokens."""
    from kernel_counts import counted

    from torch_paged_attn.backends.triton.runtime import launch_cache

    with counted(arch):
        generate("dynamic", steps, False)
        return len(launch_cache._kinds)
