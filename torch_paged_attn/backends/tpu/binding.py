"""The ops on torch tensors: from a call to a JAX function and its tensors, and back.

A front end (`front_ends.py`) runs JAX functions on its tensors. What it sees is one function for
each combination of static arguments and of tensors that are there, kept, because front ends cache
what they compile by the identity of the function.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn import environment
from torch_paged_attn.attention_call import tensor_names
from torch_paged_attn.backends.tpu.blocksparse import blocksparse as blocksparse_jax
from torch_paged_attn.backends.tpu.buckets import bucket, pad_attention, pad_tokens
from torch_paged_attn.backends.tpu.config import Config
from torch_paged_attn.backends.tpu.flash_varlen import flash_varlen as flash_varlen_jax
from torch_paged_attn.backends.tpu.front_ends import Run, current
from torch_paged_attn.backends.tpu.merge_states import merge_states as merge_states_jax
from torch_paged_attn.backends.tpu.reshape_and_cache import (
    reshape_and_cache as reshape_and_cache_jax,
)
from torch_paged_attn.backends.tpu.reshape_and_cache import (
    reshape_and_cache_split as reshape_and_cache_split_jax,
)

INT32_MAX = 2**31 - 1

# the op's tensors behind q, k and v
_TENSORS = tensor_names("flash_varlen")[3:]


def interpreting() -> bool:
    """Run the kernels in Pallas' interpreter, which needs no TPU: for tests."""
    return environment.TPU_INTERPRET


def _interpreter_options(**options: Any) -> dict[str, Any]:
    return {"interpret": True, **options} if interpreting() else {}


@functools.cache
def _with_statics(
    function: Callable[..., Any], present: tuple[bool, ...], statics: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """`function` of the tensors that are there."""

    def call(*tensors: Any) -> Any:
        given = iter(tensors)
        positional = (next(given) if is_there else None for is_there in present)
        return function(*positional, **dict(statics))

    call.__name__ = function.__name__
    return call


def _run(
    run: Run | None, function: Any, tensors: list[Tensor | None], outputs: int, **statics: Any
):
    present = tuple(tensor is not None for tensor in tensors)
    call = _with_statics(function, present, tuple(sorted(statics.items())))
    return (run or current())(call, [x for x in tensors if x is not None], outputs)


def _attend(
    run: Run | None, function: Any, layout: dict[str, Any], tensors: tuple[Any, ...], **statics: Any
) -> tuple[Tensor, Tensor]:
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *optional = tensors
    given = cu_seqlens_q, cu_seqlens_k, *optional
    arguments = {"q": q, "k": k, "v": v, **layout, **dict.fromkeys(_TENSORS)}
    arguments |= dict(zip(_TENSORS, given, strict=False))
    if arguments["rng_state"] is not None:
        arguments["rng_state"] = _words(arguments["rng_state"])
    if statics.get("out_dtype") is not None:
        statics["out_dtype"] = str(statics["out_dtype"]).removeprefix("torch.")
    if interpreting():
        # the interpreter unrolls a block's pages and heads
        statics["config"] = Config(block_k=128, step_k=128, num_buffers=2, tile_rows=32)
    out, lse = _run(
        run,
        function,
        list(pad_attention(arguments).values()),
        2,
        max_seqlen_q=bucket(int(max_seqlen_q)),
        max_seqlen_k=bucket(int(max_seqlen_k)),
        **_interpreter_options(),
        **statics,
    )
    total_q = q.shape[0]
    return out[:total_q], lse[:, :total_q]


def _words(rng_state: Tensor) -> Tensor:
    """Seed's low and high word and the offset: JAX has no 64-bit integers unless asked to."""
    seed, offset = rng_state[:1], rng_state[1:]
    words = torch.cat([seed, seed >> 32, offset]) & 0xFFFFFFFF
    return torch.where(words > INT32_MAX, words - 2**32, words).to(torch.int32)


def flash_varlen(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, run: Run | None = None, **statics: Any
) -> tuple[Tensor, Tensor]:
    """As in the op."""
    return _attend(run, flash_varlen_jax, {}, (q, k, v, *rest), **statics)


def blocksparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    crow_indices: Tensor,
    col_indices: Tensor,
    *rest: Any,
    run: Run | None = None,
    **statics: Any,
) -> tuple[Tensor, Tensor]:
    """As in the op."""
    layout = {"crow_indices": crow_indices, "col_indices": col_indices}
    return _attend(run, blocksparse_jax, layout, (q, k, v, *rest), **statics)


def _slots(slot_mapping: Tensor) -> Tensor:
    return slot_mapping.clamp(-1, INT32_MAX).to(torch.int32)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    run: Run | None = None,
) -> None:
    """As in the op; a new cache is computed and takes the old one's place."""
    key, value, slots = pad_tokens(key, value, _slots(slot_mapping))
    tensors = [key, value, kv_cache, slots, k_scale, v_scale]
    kv_cache.copy_(_run(run, reshape_and_cache_jax, tensors, 1, **_interpreter_options()))


def reshape_and_cache_split(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    run: Run | None = None,
) -> None:
    """As in the op; new caches are computed and take the old ones' place."""
    key, value, slots = pad_tokens(key, value, _slots(slot_mapping))
    tensors = [key, value, k_cache, v_cache, slots, k_scale, v_scale]
    statics = _interpreter_options()
    k_new, v_new = _run(run, reshape_and_cache_split_jax, tensors, 2, **statics)
    k_cache.copy_(k_new)
    v_cache.copy_(v_new)


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, run: Run | None = None
) -> tuple[Tensor, Tensor]:
    """As in the op."""
    return _run(run, merge_states_jax, [out_a, lse_a, out_b, lse_b], 2)
