"""`python -m torch_paged_attn compile` reads the attention of a model from its config.json."""

import argparse
import json

import pytest
import torch

from torch_paged_attn import _compile
from torch_paged_attn._model_calls import Sizes, jobs_of, serving_of
from torch_paged_attn._model_config import KeyLists, Layer, read_model

BF16 = torch.bfloat16
LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
}
GEMMA2 = {
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 224,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
DSA = KeyLists(2048, 1, 64, 128)
M3 = {"sparse_topk_blocks": 16, "sparse_block_size": 128}
LAYER = Layer(32, 8, 128, 128, 128**-0.5)
FALCON = {"model_type": "falcon", "num_attention_heads": 71, "multi_query": True, "alibi": True}
GEMMA4 = {
    **GPT_OSS,
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 4,
}


def written(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (LLAMA, [Layer(32, 8, 128, 128, 128**-0.5)]),
        ({"text_config": LLAMA, "vision_config": {}}, [Layer(32, 8, 128, 128, 128**-0.5)]),
        # all layers have it, unless it is turned off
        ({**LLAMA, "sliding_window": 4096}, [Layer(32, 8, 128, 128, 128**-0.5, 4095)]),
        (
            {**LLAMA, "sliding_window": 4096, "use_sliding_window": False},
            [Layer(32, 8, 128, 128, 128**-0.5)],
        ),
        (
            GEMMA2,
            [Layer(8, 4, 256, 256, 224**-0.5, window, softcap=50.0) for window in (-1, 4095)],
        ),
        (GPT_OSS, [Layer(64, 8, 64, 64, 0.125, window, has_sinks=True) for window in (-1, 127)]),
        (
            DEEPSEEK,
            [
                Layer(128, 128, 192, 128, 192**-0.5),
                Layer(128, 1, 576, 512, 192**-0.5, is_latent=True),
            ],
        ),
        (
            DEEPSEEK | {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
            [
                Layer(128, 128, 192, 128, 192**-0.5, mask="one"),
                Layer(128, 1, 576, 512, 192**-0.5, is_latent=True, lists=DSA),
            ],
        ),
        (
            LLAMA | {"sparse_attention_config": M3},
            [
                LAYER._replace(mask="one"),
                LAYER._replace(lists=KeyLists(16, 128), mask="heads"),
            ],
        ),
        # images see themselves; masks of numbers are not compiled ahead
        ({"model_type": "gemma3", "text_config": LLAMA}, [LAYER._replace(mask="one")]),
        (
            DEEPSEEK
            | {"model_type": "hy_v4", "index_topk": 2048, "index_n_heads": 64}
            | {"index_head_dim": 128},
            [
                Layer(128, 128, 192, 128, 192**-0.5),
                Layer(128, 1, 576, 512, 192**-0.5, is_latent=True, lists=DSA),
            ],
        ),
        (
            {**FALCON, "hidden_size": 4544},
            [Layer(71, 1, 64, 64, 0.125, has_slopes=True)],
        ),
        (GEMMA4, [Layer(64, 4, 512, 512, 1.0), Layer(64, 8, 256, 256, 1.0, 127)]),
        # as Transformers writes it, and with layers that share keys
        (
            {x: y for x, y in GEMMA4.items() if "global" not in x}
            | {"per_layer_config": {"1": {"head_dim": 512, "num_key_value_heads": 4}}}
            | {"num_kv_shared_layers": 2},
            [
                Layer(64, 4, 512, 512, 1.0, mask="one"),
                Layer(64, 8, 256, 256, 1.0, 127, mask="one"),
            ],
        ),
    ],
)
def test_layers(config, layers, tmp_path):
    assert read_model(written(tmp_path, config)).layers == layers


def test_layers_agree_with_transformers(tmp_path):
    """The names of numbers are those that Transformers writes today."""
    transformers = pytest.importorskip("transformers")
    for name, heads in {
        "LlamaConfig": (32, 32, 128),
        "MistralConfig": (32, 8, 128),
        "Qwen3Config": (32, 32, 128),
        "GptOssConfig": (64, 8, 64),
        "GPT2Config": (12, 12, 64),
        "BloomConfig": (8, 8, 8),
        "FalconConfig": (71, 1, 64),
        "Gemma3TextConfig": (8, 4, 256),
    }.items():
        config = getattr(transformers, name)().to_dict()
        found = read_model(written(tmp_path, config)).layers
        assert {x[:3] for x in found} == {heads}, name


def test_heads_are_divided_among_ranks(tmp_path):
    (layer,) = read_model(written(tmp_path, LLAMA), 16).layers
    assert (layer.num_heads, layer.num_kv_heads) == (2, 1)
    with pytest.raises(ValueError, match="32 heads cannot be divided among 3 ranks"):
        read_model(tmp_path, 3)


def test_dtype_and_length(tmp_path):
    assert read_model(written(tmp_path, LLAMA))[1:] == (BF16, 8192)
    nested = {"dtype": "float16", "text_config": {**LLAMA, "torch_dtype": None}}
    assert read_model(written(tmp_path, nested)).dtype == torch.float16


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1]", "holds no object"),
        ("{", "is no config.json"),
        ("{}", "there is no num_attention_heads or n_head or num_heads"),
        (json.dumps({"num_attention_heads": 8}), "there is no hidden_size"),
        (json.dumps({**LLAMA, "torch_dtype": "junk"}), "junk is no dtype"),
    ],
)
def test_what_is_no_config_is_refused(text, reason, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_model(tmp_path)


def run(*options):
    """As `python -m torch_paged_attn compile` does."""
    parser = argparse.ArgumentParser()
    _compile.add_arguments(parser)
    _compile.compile_model(parser.parse_args([*map(str, options)]))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--arch", "h100"), "expected --arch to be such as sm_90 or gfx942, got h100"),
        (("--arch", "sm_77"), "give --multiprocessors, which are not known of sm_77"),
        (("--arch", "sm_90", "--page-size", 0), "expected sizes of at least 1, got 0"),
        (("--arch", "sm_90", "--dtype", "int8"), "expected --dtype to be a float"),
    ],
)
def test_wrong_options_are_named(options, reason, tmp_path):
    pytest.importorskip("triton")
    with pytest.raises(SystemExit) as raised:
        run("--model", written(tmp_path, LLAMA), "--out", tmp_path / "out", *options)
    assert raised.value.code.startswith(f"compile: {reason}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["sm_90", "sm_90a", "sm90"])
def test_names_of_architectures(name):
    assert _compile.arch_named(name) == "sm90"


def test_each_use_has_jobs_of_its_own():
    sizes = Sizes(BF16, BF16, 16, 4, 64, 128)
    layer, latent = Layer(8, 2, 64, 64, 0.125), Layer(8, 1, 576, 512, 0.125, is_latent=True)
    described = [name for use in _compile.USES for name, _ in jobs_of(layer, use, sizes)]
    assert len(described) == len({*described}) == 5
    assert next(jobs_of(layer, "serving", sizes))[0] == repr(serving_of(layer, sizes))
    # of lists the calls are added, and a model's other layers have those without
    for with_lists, count in ((latent._replace(lists=DSA), 2), (LAYER._replace(lists=DSA), 1)):
        names = [name for name, _ in jobs_of(with_lists, "serving", sizes)]
        assert len(names) == count and names[0].startswith("selected ")
        training = [name for name, _ in jobs_of(with_lists, "training", sizes)]
        assert len(training) == 1 and training[0].startswith("selected training ")
    # under a mask, and of rows that are shorter than a window
    for more, count in (
        ({"mask": "one"}, 2),
        ({"window": 9}, 2),
        ({"mask": "one", "window": 9}, 3),
    ):
        names = [name for name, _ in jobs_of(layer._replace(**more), "training", sizes)]
        assert len(names) == count
    assert names[0].startswith("masked training ")
    # a use of latents has the same calls whatever it is for, and no training
    of = {use: [name for name, _ in jobs_of(latent, use, sizes)] for use in _compile.USES}
    assert of["serving"] == of["generate"] != [] == of["training"]
