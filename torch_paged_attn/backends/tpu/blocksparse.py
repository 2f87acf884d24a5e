"""`blocksparse` in JAX: `flash_varlen` that visits only the blocks of keys that are listed."""

import functools
from typing import Any

import jax
from jax import Array

from torch_paged_attn.backends.tpu.call import Call, bind, described, static_names
from torch_paged_attn.backends.tpu.config import Config
from torch_paged_attn.backends.tpu.differentiable import attend


@functools.partial(jax.jit, static_argnames=static_names("blocksparse"))
@described
def blocksparse(
    *tensors: Array | None, config: Config | None = None, interpret: Any = False, **options: Any
) -> tuple[Array, Array]:
    """Arguments as in the op and in `flash_varlen` here; the layout's tensors come behind `v`."""
    call = Call.of("blocksparse", bind(blocksparse, tensors, options))
    return attend(call, config, interpret)
