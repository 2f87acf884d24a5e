"""Every family of kernels compiles for TPU generations, within their VMEM.

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

from torch_paged_attn.backends.tpu.flash_varlen import flash_varlen

DTYPES = {
    "bf16": (jnp.bfloat16, jnp.bfloat16),
    "fp16": (jnp.float16, jnp.float16),
    "fp32": (jnp.float32, jnp.float32),
    "e4m3": (jnp.bfloat16, jnp.float8_e4m3fn),
    "e5m2": (jnp.bfloat16, jnp.float8_e5m2),
    "int8": (jnp.bfloat16, jnp.int8),
}

# what is not named is as in the first
FAMILIES = {
    "decode": {},
    "decode_page16": {"page_size": 16},
    "decode_d64": {"head_dim": 64},
    "decode_d256": {"head_dim": 256},
    "decode_mqa": {"num_heads": 8, "num_kv_heads": 1},
    "decode_28_4": {"num_heads": 28, "num_kv_heads": 4},
    "decode_features": {"softcap": 30.0, "window_size_left": 1000, "sinks": True, "alibi": True},
    "decode_fp32": {"dtype": "fp32"},
    "decode_e4m3": {"dtype": "e4m3", "page_size": 32},
    "decode_e5m2": {"dtype": "e5m2", "page_size": 32},
    "decode_int8": {"dtype": "int8", "page_size": 32},
    "mixed": {"queries": 256},
    "mixed_features": {
        "queries": 256, "softcap": 30.0, "window_size_left": 1000, "sinks": True, "alibi": True,
    },
    "mixed_fp16": {"queries": 256, "dtype": "fp16"},
    "mixed_int8": {"queries": 256, "dtype": "int8", "page_size": 32},
}  # fmt: skip

JOBS = [
    pytest.param(family, generation, id=f"{family}/{generation.name}")
    for i, family in enumerate(FAMILIES)
    for j, generation in enumerate(GENERATIONS.values())
    if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" or (i + j) % 3 == 0
]


def _call(
    generation, *, queries=1, page_size=128, num_heads=32, num_kv_heads=8, head_dim=128,
    dtype="bf16", sinks=False, alibi=False, **options,
):  # fmt: skip
    batch, pages = 4, 16
    of_q, of_cache = DTYPES[dtype]
    array = ShapeDtypeStruct
    arguments = {
        "q": array((batch * queries, num_heads, head_dim), of_q),
        "k": array((2, batch * pages, num_kv_heads, page_size, head_dim), of_cache),
        "cu_seqlens_q": np.arange(batch + 1, dtype=np.int32) * queries,
        "seqused_k": np.full(batch, pages * page_size, np.int32),
        "block_table": np.arange(batch * pages, dtype=np.int32).reshape(batch, pages),
    }
    per_head = array((num_heads,), jnp.float32)
    if sinks:
        arguments["sinks"] = per_head
    if alibi:
        arguments["alibi_slopes"] = per_head
    if of_cache != of_q:
        arguments |= dict.fromkeys(("k_descale", "v_descale"), array((), jnp.float32))

    def call(tensors):
        return flash_varlen(
            **tensors, v=None, max_seqlen_q=queries, causal=True, config=config_for(generation),
            **options,
        )  # fmt: skip

    return call, (arguments,)


@pytest.mark.parametrize(("family", "generation"), JOBS)
def test_compiles_within_vmem(family, generation):
    kernels = aot.compile_kernels(*_call(generation, **FAMILIES[family]), generation)
    assert kernels
    for kernel in kernels:
        assert 0 < kernel.vmem_bytes <= generation.vmem_bytes
