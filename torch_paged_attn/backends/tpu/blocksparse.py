"""`blocksparse` in JAX: `flash_varlen` that visits only the blocks of keys that are listed."""

import functools
from typing import Any

import jax
from jax import Array

from torch_paged_attn.backends.tpu.attention import attend
from torch_paged_attn.backends.tpu.config import Config, choose_config
from torch_paged_attn.backends.tpu.flash_varlen import STATIC, unsupported
from torch_paged_attn.backends.tpu.layout_mask import Layout
from torch_paged_attn.backends.tpu.refusal import refuse


@functools.partial(jax.jit, static_argnames=(*STATIC, "q_block_size", "k_block_size"))
def blocksparse(
    q: Array,
    k: Array,
    v: Array | None,
    crow_indices: Array,
    col_indices: Array,
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
    q_block_size: int = 64,
    k_block_size: int = 64,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    out_dtype: Any = None,
    config: Config | None = None,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Arguments as in the op and in `flash_varlen` here."""
    reason = unsupported(q, k, out_dtype)
    if reason is not None:
        refuse("blocksparse", reason)
    max_keys = k.shape[0] if block_table is None else block_table.shape[1] * k.shape[-2]
    layout = Layout(crow_indices, col_indices, q_block_size, k_block_size, max_keys)
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
        layout=layout,
    )
