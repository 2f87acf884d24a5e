"""Every family of kernels compiles for TPU generations, within their VMEM, and copies no cache.

A third of the pairs, each family and each generation among them; all with the profile `thorough`.
"""

import os

import aot
import jax.numpy as jnp
import numpy as np
import pytest
from contenders import config_for
from generations import GENERATIONS
from jax import ShapeDtypeStruct

from torch_paged_attn.backends.tpu.cache_write import reshape_and_cache
from torch_paged_attn.backends.tpu.functions import (
    blocksparse,
    flash_varlen,
    flash_varlen_backward,
    merge_states,
)
from torch_paged_attn.backends.tpu.pages import packed_shape

# of a cache that is far larger than all else
CACHE_PAGES = 4096

DTYPES = {
    "bf16": (jnp.bfloat16, jnp.bfloat16),
    "fp16": (jnp.float16, jnp.int16),  # its bits: float16 itself would be copied
    "fp32": (jnp.float32, jnp.float32),
    "e4m3": (jnp.bfloat16, jnp.float8_e4m3fn),
    "e5m2": (jnp.bfloat16, jnp.float8_e5m2),
    "int8": (jnp.bfloat16, jnp.int8),
}
FEATURES = {"softcap": 30.0, "window_size_left": 1000, "sinks": True, "alibi": True}

# what is not named is as in the first
ATTENTION = {
    "decode": {},
    "decode_page16": {"page_size": 16},
    "decode_d64": {"head_dim": 64},
    "decode_d80": {"head_dim": 80},
    "decode_d256": {"head_dim": 256},
    "decode_mqa": {"num_heads": 8, "num_kv_heads": 1},
    "decode_mha": {"num_kv_heads": 32},
    "decode_28_4": {"num_heads": 28, "num_kv_heads": 4},
    "decode_features": FEATURES,
    "decode_fp32": {"dtype": "fp32"},
    "decode_e4m3": {"dtype": "e4m3", "page_size": 32},
    "decode_e5m2": {"dtype": "e5m2", "page_size": 32},
    "decode_int8": {"dtype": "int8", "page_size": 32},
    "decode_latent": {"num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "shared": 512},
    "speculative": {"queries": 4},
    "speculative_mqa": {"queries": 4, "num_heads": 8, "num_kv_heads": 1},
    "mixed": {"queries": 256},
    "mixed_mha": {"queries": 256, "num_kv_heads": 32},
    # heads whose numbers fill no whole registers or words
    "mixed_28_4": {"queries": 20, "num_heads": 28, "num_kv_heads": 4},
    "mixed_7": {"queries": 20, "num_heads": 7, "num_kv_heads": 7},
    "mixed_alibi_of_sequences": {"queries": 20, "alibi": "sequences"},
    "mixed_d80": {"queries": 256, "head_dim": 80},
    "mixed_d256": {"queries": 256, "head_dim": 256},
    "mixed_features": FEATURES | {"queries": 256},
    "mixed_bias": {"queries": 256, "bias": True},
    "mixed_dropout": {"queries": 256, "dropout_p": 0.1},
    "mixed_fp16": {"queries": 256, "dtype": "fp16"},
    "mixed_fp32": {"queries": 256, "dtype": "fp32"},
    "mixed_int8": {"queries": 256, "dtype": "int8", "page_size": 32},
    "blocksparse_decode": {"layout_heads": 1},
    "blocksparse_mixed": {"queries": 256, "layout_heads": 1},
    "blocksparse_mixed_per_head": {"queries": 256, "layout_heads": 32},
}

# gradients, packed; what is not named is as in the first
BACKWARD = {
    "backward": {},
    "backward_d64": {"head_dim": 64},
    "backward_d256": {"head_dim": 256},
    "backward_192_128": {"head_dim": 192, "head_dim_v": 128, "num_kv_heads": 32},
    "backward_mqa": {"num_heads": 8, "num_kv_heads": 1},
    "backward_28_4": {"num_heads": 28, "num_kv_heads": 4},
    "backward_features": FEATURES,
    "backward_bias": {"bias": True},
    "backward_dropout": {"dropout_p": 0.1},
    "backward_fp16": {"dtype": "fp16"},
    "backward_fp32": {"dtype": "fp32"},
}


def over(families):
    jobs = [
        pytest.param(family, generation, id=f"{family}/{generation.name}")
        for i, family in enumerate(families)
        for j, generation in enumerate(GENERATIONS.values())
        if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" or (i + j) % 3 == 0
    ]
    return pytest.mark.parametrize(("family", "generation"), jobs)


def _attention(
    generation, *, queries=1, page_size=128, num_heads=32, num_kv_heads=8, head_dim=128,
    dtype="bf16", sinks=False, alibi=False, bias=False, layout_heads=0, shared=0, **options,
):  # fmt: skip
    batch, pages = 4, 16
    total_q, max_keys = batch * queries, pages * page_size
    of_q, of_cache = DTYPES[dtype]
    array = ShapeDtypeStruct
    page = num_kv_heads, page_size
    cache = 2, CACHE_PAGES, *page, head_dim
    # values that are the keys' first numbers: an array of no pages says how many
    values = array((0, *page, shared), of_cache) if shared else None
    arguments = {
        "q": array((total_q, num_heads, head_dim), of_q),
        "k": array(packed_shape(cache[1:] if shared else cache), of_cache),
        "v": values,
        "cu_seqlens_q": np.arange(batch + 1, dtype=np.int32) * queries,
        "seqused_k": np.full(batch, max_keys, np.int32),
        "block_table": np.arange(batch * pages, dtype=np.int32).reshape(batch, pages),
    }
    per_head = array((num_heads,), jnp.float32)
    if sinks:
        arguments["sinks"] = per_head
    if alibi:
        of_sequences = array((batch, num_heads), jnp.float32)
        arguments["alibi_slopes"] = of_sequences if alibi == "sequences" else per_head
    if bias:
        arguments["attn_bias"] = array((1, total_q, max_keys), jnp.bfloat16)
    if "dropout_p" in options:
        arguments["rng_state"] = array((3,), jnp.uint32)
    if jnp.dtype(of_cache).itemsize == 1:
        arguments |= dict.fromkeys(("k_descale", "v_descale"), array((), jnp.float32))
    op = flash_varlen
    if layout_heads:
        op, rows = blocksparse, max_keys // 64
        crow = np.arange(rows + 1, dtype=np.int32) * 2
        arguments["crow_indices"] = np.tile(crow, (layout_heads, 1))
        arguments["col_indices"] = array((layout_heads, 2 * rows), jnp.int32)

    def call(tensors):
        return op(
            **tensors, max_seqlen_q=queries, causal=True, config=config_for(generation),
            **options,
        )  # fmt: skip

    return call, (arguments,)


@over(ATTENTION)
def test_attention_compiles_within_vmem(family, generation):
    call, arguments = _attention(generation, **ATTENTION[family])
    program = aot.compile_program(call, arguments, generation)
    assert program.kernels
    for kernel in program.kernels:
        assert 0 < kernel.vmem_bytes <= generation.vmem_bytes
    cache = arguments[0]["k"]
    size = cache.size * cache.dtype.itemsize
    around = [operation for operation in program.operations if not operation.is_kernel]
    assert not [operation for operation in around if operation.result_bytes >= size // 4]


@pytest.mark.parametrize(
    "name",
    ["tpu7x", "v4", *["v5p"] * (os.environ.get("HYPOTHESIS_PROFILE") == "thorough")],
)
def test_prefill_of_many_wide_heads_compiles_within_vmem(name):
    """DeepSeek's: 128 heads of 192, of 128 for values, each with keys of its own."""
    generation, tokens, heads = GENERATIONS[name], 4096, 128
    q, k, v = (ShapeDtypeStruct((tokens, heads, n), jnp.bfloat16) for n in (192, 192, 128))

    def call(q, k, v, cu_seqlens):
        return flash_varlen(
            q, k, v, cu_seqlens, max_seqlen_q=2048, causal=True, config=config_for(generation)
        )

    arguments = q, k, v, np.array([0, 2048, 4096], np.int32)
    for kernel in aot.compile_kernels(call, arguments, generation):
        assert 0 < kernel.vmem_bytes <= generation.vmem_bytes


def _backward(
    *, num_heads=32, num_kv_heads=8, head_dim=128, head_dim_v=None, dtype="bf16", sinks=False,
    alibi=False, bias=False, **options,
):  # fmt: skip
    total, dtype = 4096, DTYPES[dtype][0]
    head_dim_v = head_dim_v or head_dim
    array = ShapeDtypeStruct
    results = array((total, num_heads, head_dim_v), dtype)
    arguments = {
        "dout": results,
        "dlse": array((num_heads, total), jnp.float32),
        "q": array((total, num_heads, head_dim), dtype),
        "k": array((total, num_kv_heads, head_dim), dtype),
        "v": array((total, num_kv_heads, head_dim_v), dtype),
        "out": results,
        "softmax_lse": array((num_heads, total), jnp.float32),
        "cu_seqlens_q": np.array([0, 1000, 4000, 4096], np.int32),
    }
    per_head = array((num_heads,), jnp.float32)
    if sinks:
        arguments["sinks"] = per_head
    if alibi:
        arguments["alibi_slopes"] = per_head
    if bias:
        arguments["attn_bias"] = array((1, total, 3000), jnp.bfloat16)
    if "dropout_p" in options:
        arguments["rng_state"] = array((3,), jnp.uint32)
    return arguments, options


@over(BACKWARD)
def test_backward_compiles_within_vmem(family, generation):
    arguments, options = _backward(**BACKWARD[family])

    def call(tensors):
        return flash_varlen_backward(
            **tensors, max_seqlen_q=3000, causal=True, config=config_for(generation), **options
        )

    kernels = aot.compile_kernels(call, (arguments,), generation)
    # where VMEM is small, a launch has some of the heads
    names = {kernel.name.split("backward_")[1].split(".")[0] for kernel in kernels}
    assert names == {"dq_dbias" if "attn_bias" in arguments else "dq", "dk_dv"}
    for kernel in kernels:
        assert 0 < kernel.vmem_bytes <= generation.vmem_bytes


@over(["bf16", "fp16", "fp32", "e4m3", "e5m2", "int8"])
def test_cache_writes_compile_within_vmem(family, generation):
    of_key, of_cache = DTYPES[family]
    key = ShapeDtypeStruct((256, 8, 128), of_key)
    cache = ShapeDtypeStruct((2, 64, 8, 32, 128), of_cache)
    slots = ShapeDtypeStruct((256,), jnp.int32)
    is_narrow = jnp.dtype(of_cache).itemsize == 1
    scales = (ShapeDtypeStruct((8,), jnp.float32),) * 2 if is_narrow else ()
    [kernel] = aot.compile_kernels(reshape_and_cache, (key, key, cache, slots, *scales), generation)
    assert 0 < kernel.vmem_bytes <= generation.vmem_bytes


@over(["bf16", "fp16", "fp32"])
def test_merging_compiles(family, generation):
    out = ShapeDtypeStruct((256, 32, 128), DTYPES[family][0])
    lse = ShapeDtypeStruct((32, 256), jnp.float32)
    assert not aot.compile_kernels(merge_states, (out, lse, out, lse), generation)  # XLA's own
