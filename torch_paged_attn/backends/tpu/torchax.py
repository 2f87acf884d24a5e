"""Our ops on torchax tensors, which are JAX arrays underneath: `register()` once, then call."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.backends.tpu import binding


def register() -> None:
    """Let torchax answer `torch.ops.paged_attn.*`, in its environments from now on."""
    from torchax.ops import ops_registry

    packets = torch.ops.paged_attn
    ops: dict[Any, Callable[..., Any]] = {
        packets.flash_varlen.default: binding.flash_varlen,
        packets.blocksparse.default: binding.blocksparse,
        packets.reshape_and_cache.default: binding.reshape_and_cache,
        packets.reshape_and_cache.split: binding.reshape_and_cache_split,
        packets.merge_states.default: binding.merge_states,
        packets.merge_states.list: binding.merge_states_list,
        packets.flash_varlen_backward.default: binding.flash_varlen_backward,
        packets.merge_states_backward.default: binding.merge_states_backward,
    }
    for op, function in ops.items():
        implementation = functools.partial(function, run=_run)
        ops_registry.register_torch_dispatch_op(op, implementation, is_jax_function=False)


def _run(function: Callable[..., Any], tensors: list[Tensor], _outputs: int) -> Any:
    from torchax import interop

    return interop.call_jax(function, *tensors)
