"""How `jax.grad` differentiates attention: by a backward of its own, with `jax.custom_vjp`.

A forward keeps its call, `out` and `softmax_lse`. The last two have names, so that a policy of
`jax.checkpoint` may save them instead of running the kernel again:

    jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(OUT, LSE))
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from torch_paged_attn.backends.tpu.attention import attend as attend_forward
from torch_paged_attn.backends.tpu.attention_gradients import (
    WITH_GRADIENT,
    Needs,
    attend_backward,
    unsupported_backward,
)
from torch_paged_attn.backends.tpu.call import Call, tensors_of
from torch_paged_attn.backends.tpu.config import Config
from torch_paged_attn.backends.tpu.refusal import refuse

OUT, LSE = "paged_attn_out", "paged_attn_softmax_lse"


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def attend(call: Call, config: Config | None, interpret: Any) -> tuple[Array, Array]:
    """`attention.attend`, with gradients of q, k, v, attn_bias and sinks if keys are packed."""
    return attend_forward(call, config=config, interpret=interpret)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Needed:
    """The gradients that a backward is asked for. The class makes JAX take them as static."""

    needs: Needs


def _forward(call: Call, config: Config | None, interpret: Any) -> tuple[Any, Any]:
    perturbed = {name for name, x in tensors_of(call).items() if x.perturbed}
    call = jax.tree.map(lambda x: x.value, call)
    if (reason := unsupported_backward(call)) is not None:
        refuse(call.op, f"{min(perturbed)} requires grad, and {reason}")
    if others := sorted(perturbed - set(WITH_GRADIENT)):
        refuse(call.op, f"{others[0]} requires grad, and has no gradient")
    needs = _Needed(tuple(name in perturbed for name in WITH_GRADIENT))  # type: ignore[arg-type]
    out, lse = attend_forward(call, config=config, interpret=interpret)
    out, lse = checkpoint_name(out, OUT), checkpoint_name(lse, LSE)
    return (out, lse), (call, out, lse, needs)


def _backward(config: Config | None, interpret: Any, kept: Any, given: Any) -> tuple[Call]:
    call, out, lse, needed = kept
    dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in given)
    gradients = attend_backward(
        call,
        jnp.zeros_like(out) if dout is None else dout,
        dlse,
        out,
        lse,
        needs=needed.needs,
        config=config,
        interpret=interpret,
    )
    # None stands for no gradient
    cleared = dict.fromkeys(tensors_of(call)) | dict(zip(WITH_GRADIENT, gradients, strict=True))
    return (dataclasses.replace(call, **cleared),)


attend.defvjp(_forward, _backward, symbolic_zeros=True)
