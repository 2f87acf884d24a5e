"""Models of two layers, of each kind of attention, and how they generate."""

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

NEW_TOKENS = 12

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.6,  # far apart logits: a wrong key changes a token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

MODELS = {
    "full": ("Llama", {}),
    "sliding": ("Mistral", {"sliding_window": 7}),
    "softcap": (
        "Gemma2",
        {"sliding_window": 7, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8},
    ),
    "sinks": ("GptOss", {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1}),
}


def make_model(name, attn_implementation):
    prefix, options = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**SIZES, **options)
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{prefix}ForCausalLM")
    model = model_class._from_config(config, attn_implementation=attn_implementation).eval()
    return model


def generate_batch(model, prompts, page_size, max_batch_tokens):
    fields = ContinuousBatchingConfig.__dataclass_fields__
    results = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            use_cache=False,
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            **{"page_size" if "page_size" in fields else "block_size": page_size},
            num_blocks=128,
            max_batch_tokens=max_batch_tokens,
        ),
    )
    return [result.generated_tokens for result in results.values()]
