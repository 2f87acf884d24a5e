"""`flash_varlen_backward` in JAX."""

import functools
from typing import Any

import jax
from jax import Array

from torch_paged_attn.backends.tpu.attention_gradients import Gradients, Needs, attend_backward
from torch_paged_attn.backends.tpu.call import Call, bind, described, static_names
from torch_paged_attn.backends.tpu.config import Config

RESULTS = ("dout", "dlse", "out", "softmax_lse")


@functools.partial(jax.jit, static_argnames=static_names("flash_varlen_backward"))
@described
def flash_varlen_backward(
    *tensors: Array | None,
    output_mask: Needs = (True, True, True, True, True),
    config: Config | None = None,
    interpret: Any = False,
    **options: Any,
) -> Gradients:
    """Arguments as in the op and in `flash_varlen` here; what is not asked for, or has no input, is
    None. `jax.grad` of `flash_varlen` calls the same kernels.
    """
    given = bind(flash_varlen_backward, tensors, options)
    results = [given.pop(name) for name in RESULTS]
    call = Call.of("flash_varlen", given)
    return attend_backward(call, *results, needs=output_mask, config=config, interpret=interpret)
