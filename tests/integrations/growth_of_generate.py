"""Loops of a small model whose keys grow, for `kernel_counts.counted_in`."""

import torch
import transformers

from torch_paged_attn.integrations import transformers as paged

SIZES = {
    **{"vocab_size": 97, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    **{"max_position_embeddings": 1024, "pad_token_id": 0},
    **{"bos_token_id": None, "eos_token_id": None},
}


def model(name="Llama", **options):
    paged.register()
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    model_class = getattr(transformers, f"{name}ForCausalLM")
    made = model_class._from_config(config, attn_implementation=paged.NAME, dtype=torch.bfloat16)
    return made.eval()


def generate(cache, steps, padded, window=None):
    """`steps` tokens after a prompt of 30, with a cache of Transformers."""
    made = model("Mistral", sliding_window=window) if window else model()
    ids, mask = torch.full((2, 30), 5), torch.ones(2, 30, dtype=torch.long)
    if padded:
        mask[0, :7] = 0
    options = {"cache_implementation": cache, "max_new_tokens": steps, "do_sample": False}
    with torch.inference_mode():
        made.generate(ids, attention_mask=mask, pad_token_id=0, disable_compile=True, **options)


def verify(steps):
    """Steps of five draft tokens each, as assisted decoding has them."""
    made = model()
    cache = transformers.DynamicCache(config=made.config)
    with torch.inference_mode():
        for step in range(steps):
            made(torch.full((1, 5 if step else 30), 5), past_key_values=cache)


def kinds_of_generate(arch, steps):
    """How many kinds of calls the host worked out in `steps` tokens."""
    from kernel_counts import counted

    from torch_paged_attn.backends.triton.runtime import launch_cache

    with counted(arch):
        generate("dynamic", steps, False)
        return len(launch_cache._kinds)
