"""The attention of a model, read from the `config.json` of Hugging Face Transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

# keys of a config that hold the one of the language model
NESTED = "text_config", "llm_config", "language_config"
# models of older configs without `layer_types` whose layers take turns with and without a window
ALTERNATE = "gemma2", "gemma3", "cohere2", "gpt_oss"
# Decoders of Transformers, beside those with lists of keys, that train under a bool mask of all
# pairs of queries and keys: flash-attn cannot serve them; or a prefix, or an image, sees itself
MASKED = "evolla", "idefics", "mllama_text_model", "qwen4_exp_text", "step3p5"
OVERLAID = (
    *("deepseek_ocr2", "diffusion_gemma", "gemma3", "hrm_text", "molmo2", "paligemma"),
    "unlimited_ocr",
)
# those with lists whose masks are numbers, for which nothing is compiled ahead
ADDED = "deepseek_v4", "hy_v4"


class KeyLists(NamedTuple):
    """Of layers whose tokens see the units of keys that a list names. index_heads: of the queries
    by which DeepSeek's indexer selects single keys with one list for all heads; 0: a list for each
    KV head, made by the model's own code.
    """

    units: int
    select_size: int
    index_heads: int = 0
    index_dim: int = 0


class Layer(NamedTuple):
    """What the calls of some layers share. `window`: keys before a query that it sees; -1: all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    window: int = -1
    softcap: float = 0.0
    has_sinks: bool = False
    has_slopes: bool = False
    # over the latents of MLA, of which the first head_dim_v numbers are the values
    is_latent: bool = False
    lists: KeyLists | None = None
    # the bool mask of all pairs that Transformers' model trains under: "one" for all heads, or
    # "heads"; "": none
    mask: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `flash_varlen`."""
        return {
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "window_size_left": self.window,
            "window_size_right": self.window,
            "causal": True,
        }


class Model(NamedTuple):
    """layers: those that differ, each once; max_length: keys of the longest sequence"""

    layers: list[Layer]
    dtype: torch.dtype
    max_length: int


def read_model(path: Path, ranks: int = 1) -> Model:
    """The model of a `config.json`, or of a folder that has one. `ranks`: tensor parallelism, by
    which heads are divided.

    Raises:
        ValueError: the file is no such config, or a number in it is missing or unusable.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no config.json: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no config.json: it holds no object")
    dtype = _first(config, "dtype", "torch_dtype")
    kinds = {str(config.get("model_type"))}
    config = next((config[x] for x in NESTED if isinstance(config.get(x), dict)), config)
    kinds.add(str(config.get("model_type")))
    dtype = _first(config, "dtype", "torch_dtype") or dtype or "bfloat16"
    try:
        is_masked = _is_masked(config, kinds)
        layers = list(dict.fromkeys(_with_mask(x, is_masked) for x in _layers(config, ranks)))
    except KeyError as error:
        raise ValueError(f"{path}: there is no {error.args[0]}") from None
    length = _first(config, "max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
    return Model(layers, dtype_named(dtype), int(length or 4096))


def dtype_named(name: str) -> torch.dtype:
    """`bfloat16` and `torch.bfloat16` alike."""
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype of torch")
    return dtype


def _first(config: dict[str, Any], *names: str) -> Any:
    return next((config[x] for x in names if config.get(x) is not None), None)


def _number(config: dict[str, Any], *names: str) -> int:
    value = _first(config, *names)
    if type(value) is not int or value < 1:
        raise KeyError(" or ".join(names))
    return value


def _layers(config: dict[str, Any], ranks: int) -> Iterator[Layer]:
    heads = _number(config, "num_attention_heads", "n_head", "num_heads")
    if heads % ranks:
        raise ValueError(f"{heads} heads cannot be divided among {ranks} ranks")
    heads_here = heads // ranks
    if config.get("kv_lora_rank"):
        yield from _latent_layers(config, heads_here)
        return
    shared = 1 if config.get("multi_query") else heads
    if config.get("new_decoder_architecture") or "num_key_value_heads" in config:
        shared = _first(config, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
    head_dim = _first(config, "head_dim") or _number(config, "hidden_size", "n_embd") // heads
    sinks = config.get("model_type") == "gpt_oss"
    lists = _block_lists(config)
    for kind in _kinds(config):
        own = _overrides(config, kind)
        dim, kv_heads = own.get("head_dim", head_dim), own.get("num_key_value_heads", shared)
        window = -1
        if kind == "full_attention":
            # Gemma 4
            dim = config.get("global_head_dim") or dim
            kv_heads = config.get("num_global_key_value_heads") or kv_heads
        else:
            window = config["sliding_window"] - 1
        scale = float(dim**-0.5)
        if config.get("query_pre_attn_scalar"):
            scale = float(config["query_pre_attn_scalar"] ** -0.5)
        elif config.get("attention_multiplier"):
            scale = float(config["attention_multiplier"])
        elif str(config.get("model_type")).startswith("gemma4"):
            scale = 1.0
        yield Layer(
            *(heads_here, max(kv_heads // ranks, 1), dim, dim, scale, window),
            softcap=float(config.get("attn_logit_softcapping") or 0.0),
            has_sinks=sinks,
            has_slopes=bool(config.get("alibi")) or config.get("model_type") == "bloom",
        )
        if lists is not None:
            yield Layer(heads_here, max(kv_heads // ranks, 1), dim, dim, scale, lists=lists)


def _is_masked(config: dict[str, Any], kinds: set[str]) -> bool:
    """Whether the model trains under a bool mask of all pairs, by the types of the config and of
    the language model's: always, or for some of its batches."""
    if not kinds.isdisjoint(ADDED):
        return False
    if not kinds.isdisjoint((*MASKED, *OVERLAID)) or config.get("index_topk"):
        return True
    if _block_lists(config) is not None:
        return True
    if not any(kind.startswith("gemma4") for kind in kinds):
        return False
    # layers that share keys cut queries off their masks; images see themselves
    is_cut = bool(config.get("num_kv_shared_layers"))
    return is_cut or config.get("use_bidirectional_attention") == "vision"


def _with_mask(layer: Layer, is_masked: bool) -> Layer:
    """The layer with the mask that it has in a model that trains under some."""
    if not is_masked or layer.is_latent:
        return layer
    has_own = layer.lists is not None and layer.num_kv_heads > 1
    return layer._replace(mask="heads" if has_own else "one")


def _block_lists(config: dict[str, Any]) -> KeyLists | None:
    """MiniMax M3's lists of blocks of keys, by the names of its checkpoint or of Transformers."""
    more = config | (config.get("sparse_attention_config") or {})
    if _first(more, "sparse_topk_blocks", "index_topk_blocks") is None:
        return None
    return KeyLists(
        _number(more, "sparse_topk_blocks", "index_topk_blocks"),
        _number(more, "sparse_block_size", "index_block_size"),
    )


def _overrides(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """What Transformers writes of the layers of a kind that differs from the rest of the config."""
    types, is_sliding = config.get("layer_types") or [], kind == "sliding_attention"
    for i, own in (config.get("per_layer_config") or {}).items():
        if int(i) < len(types) and (types[int(i)] == "sliding_attention") == is_sliding:
            return own
    return {}


def _kinds(config: dict[str, Any]) -> list[str]:
    """`full_attention`, `sliding_attention` or both."""
    types = config.get("layer_types")
    has_window = type(config.get("sliding_window")) is int
    if not has_window or config.get("use_sliding_window") is False:
        return ["full_attention"]
    if isinstance(types, list):
        # other kinds than these have no attention, or keys that a mask selects
        found = {x if x == "sliding_attention" else "full_attention" for x in types}
        return sorted(found)
    pattern = _first(config, "sliding_window_pattern", "_sliding_window_pattern")
    both = str(config.get("model_type")).startswith(ALTERNATE) or pattern
    if both or "max_window_layers" in config:
        return ["full_attention", "sliding_attention"]
    return ["sliding_attention"]


def _latent_layers(config: dict[str, Any], heads: int) -> Iterator[Layer]:
    """MLA: prefill with heads of their own, decode over the latents."""
    rank, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
    dim = _number(config, "qk_nope_head_dim") + rope
    scale = float(dim**-0.5)
    yield Layer(heads, heads, dim, _number(config, "v_head_dim"), scale)
    lists = None
    if config.get("index_topk"):  # DeepSeek's DSA, and GLM's
        index = _number(config, "index_n_heads"), _number(config, "index_head_dim")
        lists = KeyLists(_number(config, "index_topk"), 1, *index)
    yield Layer(heads, 1, rank + rope, rank, scale, is_latent=True, lists=lists)
