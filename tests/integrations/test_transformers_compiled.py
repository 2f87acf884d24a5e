"""`generate` with a static cache, whose steps are compiled: Transformers makes masks outside."""

import pytest
import torch
import transformers
from transformers.generation.configuration_utils import CompileConfig

from torch_paged_attn.integrations import _transformers_masks as masks
from torch_paged_attn.integrations import transformers as paged
from torch_paged_attn.integrations._transformers_short import ShortMask, short_form

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS = {
    "llama": ("Llama", {}),
    "gpt_oss": ("GptOss", {"sliding_window": 19, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "gemma2": ("Gemma2", {"sliding_window": 19, "attn_logit_softcapping": 1.5}),
}
NEW_TOKENS = 4


def make(name):
    kind, more = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    return model_class._from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("gpt_oss", "user"),
        # test_transformers_growth.py has `generate`
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [("gemma2", "user"), *((x, "generate") for x in MODELS)]
        ),
    ],
)
def test_tokens_of_a_static_cache(name, by):
    """Compiled by `generate`, its steps alone; by a user, the prompt too. There are as many
    graphs as with eager attention, and the tokens are its own.
    """
    paged.register()
    prompts = torch.randint(1, 97, (2, 3, 30), generator=torch.Generator().manual_seed(1))
    padding = torch.ones(3, 30, dtype=torch.long)
    padding[0, :11] = 0
    options = {"attention_mask": padding, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    wanted, of_eager, _ = generate(name, by, "eager", prompts, options)
    found, graphs, more = generate(name, by, paged.NAME, prompts, options)
    assert torch.equal(found, wanted)
    assert 1 <= graphs <= of_eager and more <= 1


def generate(name, by, attn_implementation, prompts, options):
    """Tokens of the prompts, the graphs that were compiled for the first, and for the second."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = make(name)
    model.set_attn_implementation(attn_implementation)
    options = options | {"cache_implementation": "static"}
    if by == "user":
        model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
        options["disable_compile"] = True
    else:
        options["compile_config"] = CompileConfig(backend="eager", fullgraph=True, mode=None)
        options["compile_config"]._compile_all_devices = True
    found, graphs = [], [0]
    for x in prompts:
        found.append(model.generate(x, **options))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return torch.stack(found), graphs[1], graphs[2] - graphs[1]


@pytest.mark.parametrize("largest", [1 << 28, 3 * 30 * 64 - 1])
def test_a_large_mask_of_all_pairs_is_not_made(largest, monkeypatch):
    """Nor is a smaller one made twice."""
    monkeypatch.setattr(masks, "LARGEST_BESIDE", largest)
    options = {"config": transformers.LlamaConfig(**SIZES), "device": "cpu"}

    def create_masks_for_generate():  # by this name it is found
        return masks.make_mask(3, 30, 64, **options)

    mask = create_masks_for_generate()
    assert (type(mask) is ShortMask) == (largest < 3 * 30 * 64)
    assert mask.shape == (3, 1, 30, 64) and short_form(mask)._full is None
