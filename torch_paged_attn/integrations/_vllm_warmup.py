"""Kernels of vLLM's layers are compiled when vLLM starts, before it captures graphs."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from torch_paged_attn._serving import Serving, warm_up
from torch_paged_attn._warmup import MOST_PROCESSES, usable_cores

logger = logging.getLogger("torch_paged_attn")


def warm_up_layers(
    vllm_config: Any,
    layer_names: list[str],
    kv_cache_spec: Any,
    block_table_width: int | None,
    is_cross: bool,
    device: torch.device,
) -> None:
    """Compile and load the kernels of these layers on a GPU: in parallel processes, and once for
    layers that are alike. Nothing is done if vLLM's own warm-up is off, as with `enforce_eager`.
    """
    if torch.device(device).type != "cuda" or not is_wanted(vllm_config):
        return
    layers = vllm_config.compilation_config.static_forward_context
    impls = [impl for n in layer_names if (impl := getattr(layers.get(n), "impl", None))]
    distinct = {
        serving_of(impl, vllm_config, kv_cache_spec, block_table_width, is_cross)
        for impl in impls
        if not impl.is_encoder
    }
    ranks = vllm_config.parallel_config.world_size
    processes = max(min(usable_cores() // max(ranks, 1), 2 * MOST_PROCESSES), 1)
    for serving in distinct:
        start = time.perf_counter()
        count = warm_up(serving, device, processes)
        seconds = time.perf_counter() - start
        if seconds > 0.1:  # not one that was warm already
            logger.info("%d calls made kernels ready for %s in %.1f s", count, serving, seconds)


def is_wanted(vllm_config: Any) -> bool:
    """Whether vLLM warms up kernels (`--kernel-config.enable_jit_warmup`)."""
    return getattr(getattr(vllm_config, "kernel_config", None), "enable_jit_warmup", True)


def serving_of(
    impl: Any,
    vllm_config: Any,
    kv_cache_spec: Any,
    block_table_width: int | None,
    is_cross: bool,
) -> Serving:
    """What calls of a layer share."""
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    page_size, dtype = kv_cache_spec.block_size, model.dtype
    if block_table_width is None:  # of older versions
        block_table_width = -(-model.max_model_len // page_size)
    # letters of layers, blocks, heads, tokens, content, outermost first; older versions have none
    layout = getattr(vllm_config.cache_config, "kv_cache_layout", None) or "LBNHC"
    tensors = "sinks", "alibi_slopes"
    options = {n: x for n, x in impl.options.items() if n not in tensors} | {"causal": not is_cross}
    return Serving(
        num_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        head_dim=impl.head_size,
        dtype=dtype,
        kv_dtype=impl.cache_dtype or getattr(kv_cache_spec, "dtype", dtype),
        page_size=page_size,
        max_pages=block_table_width,
        max_batch=scheduler.max_num_seqs,
        max_tokens=scheduler.max_num_batched_tokens,
        max_length=model.max_model_len,
        has_sinks=impl.sinks is not None,
        has_slopes=impl.alibi_slopes is not None,
        by_token=impl.is_by_token,
        tokens_first=layout.index("N") < layout.index("H"),
        options=tuple(sorted(options.items())),
    )
