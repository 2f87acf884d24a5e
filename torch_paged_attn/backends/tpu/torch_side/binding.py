"""The ops on torch tensors: from a call to a JAX function and its tensors, and back.

A front end (`front_ends.py`) runs JAX functions of arrays on its tensors. It caches what it has
compiled by the identity of the function, so there is one function, kept, for each combination of
static arguments and of tensors that are given. torchax has no front end: `register_torchax()` once,
then call.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import Tensor

from torch_paged_attn import environment
from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.tpu import BACKEND, cache_write, functions
from torch_paged_attn.backends.tpu.attention import attend
from torch_paged_attn.backends.tpu.attention_gradients import wanted_gradients
from torch_paged_attn.backends.tpu.call import DEFAULTS, Call
from torch_paged_attn.backends.tpu.tile_sizes import Config
from torch_paged_attn.backends.tpu.torch_side.front_ends import DONATING, Run, current
from torch_paged_attn.backends.tpu.torch_side.tensors import (
    is_alone,
    is_front_of,
    memory_of,
    pad_attention,
    pad_results,
    pad_tokens,
    whole_of,
)
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops.lacking import OPTIONAL, refuse_lacking
from torch_paged_attn.ops.selected_pages import attend_pages

INT32_MAX = 2**31 - 1

# sizes for Pallas' interpreter, which unrolls a block's pages and heads
SMALL = Config(block_k=128, step_k=128, num_buffers=2, tile_rows=32)


@functools.cache
def _of_leaves(
    function: Callable[..., Any], structure: Any, options: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """`function` of the leaves of its arguments."""

    def call(*leaves: Any) -> Any:
        return function(*jax.tree.unflatten(structure, leaves), **dict(options))

    call.__name__ = function.__name__
    return call


def _run(
    run: Run | None,
    function: Any,
    arguments: list[Any],
    outputs: int,
    *,
    donated: tuple[int, ...] = (),
    **options: Any,
) -> Any:
    """Run a JAX function on torch tensors, wherever they stand in its arguments. The results get
    the memory of the tensors at the places `donated`.
    """
    # a front end may have told JAX what its tensors consist of
    leaves, structure = jax.tree.flatten(arguments, is_leaf=lambda x: isinstance(x, Tensor))
    call = _of_leaves(function, structure, tuple(options.items()))
    places = {"donated": donated} if donated else {}
    return (run or current())(call, leaves, outputs, **places)


def _write(
    run: Run | None,
    function: Any,
    new: tuple[Tensor, Tensor],
    caches: tuple[Tensor, ...],
    slot_mapping: Tensor,
    *scales: Tensor | None,
) -> None:
    """Compute new caches by `function`, and put them in the place of the old ones."""
    run = run or current()
    key, value, slots = pad_tokens(*new, slot_mapping.clamp(-1, INT32_MAX).to(torch.int32))
    caches = tuple(map(memory_of, caches))
    is_given = environment.TPU_DONATE and run in DONATING and not torch.compiler.is_compiling()
    is_given = is_given and all(map(is_alone, caches))
    donated = tuple(range(2, 2 + len(caches))) if is_given else ()
    interpret = environment.TPU_INTERPRET
    tensors = [key, value, *caches, slots, *scales]
    results = _run(run, function, tensors, len(caches), donated=donated, interpret=interpret)
    for cache, new_cache in zip(caches, results if len(caches) > 1 else [results], strict=True):
        if is_given:
            cache.set_(new_cache)  # its own memory was given away
        else:
            cache.copy_(new_cache)


def _attend(
    run: Run | None, op: str, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """`args` and `options` are what the dispatcher calls `op` with."""
    refuse_lacking(getattr(AttentionCall, op)(*args, **options), "tpu", BACKEND.lacks)
    call = _call(op, dict(zip(DEFAULTS[op], args, strict=False)) | options)
    if call.block_table is not None:
        call = _reading_memory(call)
    out, lse = _run(run, attend, [pad_attention(call)], 2, **_sizes())
    return out[: call.total_q], lse[:, : call.total_q]


def _reading_memory(call: Call) -> Call:
    """The call with the tensors that its cache's are views of, where a kernel reads those."""
    k, v = memory_of(call.k), memory_of(call.v)
    changed: dict[str, Any] = {"k": k, "v": v}
    if (whole := whole_of(call.k, call.v)) is not None:
        changed = {"k": whole, "v": None}
    elif is_front_of(call.v, call.k):
        changed["v"] = call.v.new_empty((0, *call.v.shape[1:]))
    reading = dataclasses.replace(call, **changed)
    # the width of values follows from their rows, which may end in numbers of no value
    return reading if reading.head_dim_v == call.v.shape[-1] else call


def _call(op: str, given: dict[str, Any]) -> Call:
    """The call of torch tensors, in what JAX has types for."""
    if given.get("rng_state") is not None:
        given["rng_state"] = _words(given["rng_state"])
    if given.get("out_dtype") is not None:
        given["out_dtype"] = str(given["out_dtype"]).removeprefix("torch.")
    return Call.of(op, given)


def _sizes() -> dict[str, Any]:
    interpret = environment.TPU_INTERPRET
    return {"config": SMALL if interpret else None, "interpret": interpret}


def _words(rng_state: Tensor) -> Tensor:
    """Seed's low and high word and the offset: JAX has no 64-bit integers unless asked to."""
    seed, offset = rng_state[:1], rng_state[1:]
    words = torch.cat([seed, seed >> 32, offset]) & 0xFFFFFFFF
    return torch.where(words > INT32_MAX, words - 2**32, words).to(torch.int32)


def flash_varlen(*args: Any, run: Run | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """As in the op."""
    return _attend(run, "flash_varlen", args, options)


def flash_varlen_out(out: Tensor, *args: Any, run: Run | None = None, **options: Any) -> Tensor:
    """As in the op; JAX returns new arrays, so that the result is copied."""
    found, lse = flash_varlen(*args, run=run, out_dtype=out.dtype, **options)
    out.copy_(found)
    return lse


def blocksparse(*args: Any, run: Run | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """As in the op."""
    return _attend(run, "blocksparse", args, options)


def selected_attention(*args: Any, run: Run | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """As in the op, of units that are pages."""
    call = AttentionCall.selected_attention(*args, **options)
    refuse_lacking(call, "tpu", BACKEND.lacks)
    return attend_pages(call, "tpu", lambda pages: flash_varlen(run=run, **pages.given()))


def flash_varlen_backward(*args: Any, run: Run | None = None, **options: Any) -> tuple[Tensor, ...]:
    """As in the op."""
    backward = BackwardCall.flash_varlen(*args, **options)
    refuse_lacking(backward.named_forward(), "tpu", OPTIONAL)
    call = _call("flash_varlen", backward.forward.given())
    padded = pad_attention(call)
    results = backward.dout, backward.dlse, backward.out, backward.softmax_lse
    tensors = [padded, *pad_results(padded.total_q, *results)]
    wanted = backward.wanted
    found = _run(run, wanted_gradients, tensors, sum(wanted), needs=wanted, **_sizes())
    gradients = iter(found if isinstance(found, tuple | list) else [found])
    # the axis that was padded, and how long it was
    of_queries, of_keys, of_bias = (0, call.total_q), (0, call.k.shape[0]), (1, call.total_q)
    axes = of_queries, of_keys, of_keys, of_bias, (0, call.num_heads)
    return tuple(
        next(gradients).narrow(axis, 0, length) if is_wanted else call.q.new_empty(0)
        for is_wanted, (axis, length) in zip(wanted, axes, strict=True)
    )


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
    function, new = cache_write.reshape_and_cache, (key, value)
    _write(run, function, new, (kv_cache,), slot_mapping, k_scale, v_scale)


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
    function, new = cache_write.reshape_and_cache_split, (key, value)
    _write(run, function, new, (k_cache, v_cache), slot_mapping, k_scale, v_scale)


def merge_states_backward(
    dout: Tensor, dlse: Tensor | None, *states: Tensor, run: Run | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As in the op."""
    return _run(run, functions.merge_states_backward, [dout, dlse, *states], 4)


def merge_states(*states: Tensor, run: Run | None = None) -> tuple[Tensor, Tensor]:
    """As in the op."""
    return _run(run, functions.merge_states, list(states), 2)


def merge_states_list(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    *,
    out_dtype: torch.dtype | None = None,
    run: Run | None = None,
) -> tuple[Tensor, Tensor]:
    """As in the op."""
    dtype = None if out_dtype is None else str(out_dtype).removeprefix("torch.")
    return _run(run, functions.merge_states_list, [list(outs), list(lses)], 2, out_dtype=dtype)


OPS = (
    *("flash_varlen", "blocksparse", "selected_attention", "flash_varlen_backward"),
    *("reshape_and_cache", "reshape_and_cache.split"),
    *("merge_states", "merge_states.list", "merge_states_backward"),
)


def register_torchax() -> None:
    """Let torchax answer `torch.ops.paged_attn.*`, in its environments from now on."""
    from torchax.ops import ops_registry

    for name in OPS:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.paged_attn, packet), overload or "default")
        function = functools.partial(BACKEND.function(name), run=_run_torchax)
        ops_registry.register_torch_dispatch_op(op, function, is_jax_function=False)


def _run_torchax(function: Callable[..., Any], tensors: list[Tensor], _outputs: int) -> Any:
    from torchax import interop

    return interop.call_jax(function, *tensors)
