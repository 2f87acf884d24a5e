"""`flash_varlen_backward` in JAX."""

import functools
from typing import Any

import jax
from jax import Array

from torch_paged_attn.backends.tpu.attention_gradients import Gradients, attend_backward
from torch_paged_attn.backends.tpu.call import Call
from torch_paged_attn.backends.tpu.config import Config


@functools.partial(
    jax.jit,
    static_argnames=(
        "max_seqlen_q",
        "max_seqlen_k",
        "softmax_scale",
        "causal",
        "window_size_left",
        "window_size_right",
        "softcap",
        "dropout_p",
        "output_mask",
        "config",
        "interpret",
    ),
)
def flash_varlen_backward(
    dout: Array,
    dlse: Array | None,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    softmax_lse: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    seqused_k: Array | None = None,
    attn_bias: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    rng_state: Array | None = None,
    *,
    output_mask: tuple[bool, bool, bool, bool, bool] = (True, True, True, False, False),
    config: Config | None = None,
    interpret: Any = False,
    **options: Any,
) -> Gradients:
    """Arguments as in the op, in JAX's types."""
    given = dict(
        q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k,
        attn_bias=attn_bias, alibi_slopes=alibi_slopes, sinks=sinks, rng_state=rng_state,
    )  # fmt: skip
    call = Call.of("flash_varlen", given | options)
    return attend_backward(
        call, dout, dlse, out, softmax_lse, needs=output_mask, config=config, interpret=interpret
    )
