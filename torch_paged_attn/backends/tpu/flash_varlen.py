"""`flash_varlen` in JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from torch_paged_attn.attention_call import option_names
from torch_paged_attn.backends.tpu.attention import FLOAT8, FLOATS, attend
from torch_paged_attn.backends.tpu.config import Config, choose_config
from torch_paged_attn.backends.tpu.refusal import refuse

STATIC = ("max_seqlen_q", "max_seqlen_k", *option_names("flash_varlen"), "config", "interpret")


def unsupported(q: Array, k: Array, out_dtype: Any = None, **_rest: Any) -> str | None:
    """What of a valid call has no kernel yet: the argument, what came, what is supported."""
    queries, stored = (*FLOATS, *FLOAT8), (q.dtype.name, *FLOAT8, "int8")
    results = jnp.dtype(out_dtype or q.dtype).name
    if q.dtype.name not in queries:
        return f"q has dtype {q.dtype.name}; supported: {', '.join(queries)}"
    if k.dtype.name not in stored:
        return f"k has dtype {k.dtype.name}; supported: {', '.join(stored)}"
    if results not in queries:
        return f"out_dtype is {results}; supported: {', '.join(queries)}"
    return None


@functools.partial(jax.jit, static_argnames=STATIC)
def flash_varlen(
    q: Array,
    k: Array,
    v: Array | None,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    seqused_k: Array | None = None,
    block_table: Array | None = None,
    attn_bias: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    out_scale: Array | None = None,
    rng_state: Array | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    out_dtype: Any = None,
    config: Config | None = None,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Arguments as in the op, in JAX's types; `(out, softmax_lse)`.

    A cache that is one array `(2, num_pages, num_kv_heads, page_size, head_dim)` is passed whole as
    `k`, with `v` None: slices of it would be copies. `rng_state` may be three 32-bit words: the
    seed's low and high one, and the offset. `interpret` is Pallas' own.
    """
    reason = unsupported(q, k, out_dtype)
    if reason is not None:
        refuse("flash_varlen", reason)
    return attend(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        block_table,
        attn_bias,
        alibi_slopes,
        sinks,
        q_descale,
        k_descale,
        v_descale,
        out_scale,
        rng_state,
        max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size_left=window_size_left,
        window_size_right=window_size_right,
        softcap=softcap,
        dropout_p=dropout_p,
        out_dtype=out_dtype,
        config=choose_config(config),
        interpret=interpret,
    )
