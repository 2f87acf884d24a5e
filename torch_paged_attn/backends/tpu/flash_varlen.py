"""`flash_varlen` in JAX."""

import functools
from typing import Any

import jax
from jax import Array

from torch_paged_attn.backends.tpu.call import Call, bind, described, static_names
from torch_paged_attn.backends.tpu.config import Config
from torch_paged_attn.backends.tpu.differentiable import attend


@functools.partial(jax.jit, static_argnames=static_names("flash_varlen"))
@described
def flash_varlen(
    *tensors: Array | None, config: Config | None = None, interpret: Any = False, **options: Any
) -> tuple[Array, Array]:
    """Arguments as in the op, in JAX's types; `(out, softmax_lse)`.

    Tensors come in the op's order, all else by name. A cache that is one array
    `(2, num_pages, num_kv_heads, page_size, head_dim)` is passed whole as `k`, with `v` None:
    slices of it would be copies. `rng_state` may be three 32-bit words: the seed's low and high
    one, and the offset. `config` are sizes of tiles, chosen for the chip if it is None;
    `interpret` is Pallas' own.
    """
    call = Call.of("flash_varlen", bind(flash_varlen, tensors, options))
    return attend(call, config, interpret)
