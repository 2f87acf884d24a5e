"""Batches over caches of 8 bits and int4 in which some sequences have many queries.

A tile of 128 queries would convert all keys that it sees. Instead, keys and values of sequences
with many queries are copied once into a workspace, as numbers in 16 bits and scales by token and
head (`unpack_kernel.py`), over which Hopper's kernel for 16 bits runs: it multiplies scores and
probabilities by the scales. The other sequences, which decode, go through the portable kernel over
the cache itself, afterwards: beside each other, each on a part of the chip, both take longer.

The workspace has room for some keys only. If the block table may hold more, a third launch, of
Hopper's kernel that converts, takes the sequences that found none.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, is_by_token, is_int4
from torch_paged_attn.backends.triton.common.dequant import as_stored, stored_format
from torch_paged_attn.backends.triton.common.page_sizes import has_rows
from torch_paged_attn.backends.triton.common.unpack_kernel import (
    Unpacked,
    UnpackStrides,
    _unpack_kernel,
)
from torch_paged_attn.backends.triton.dispatch.cost_model import least_queries
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.forward import plan as hopper
from torch_paged_attn.backends.triton.hopper.forward.choices import Form
from torch_paged_attn.backends.triton.portable.forward import plan as portable
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import cdiv, next_power_of_2, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation

# bytes of a workspace, more only for the keys of one sequence, and then up to twice as many
MOST_BYTES = 512 << 20
# keys of a program's turn, sequences that it looks at at a time, warps, and programs to a
# multiprocessor
BLOCK, WIDTH, WARPS, RESIDENT = 64, 256, 4, 8

# tiles of both launches over 16-bit and over 8-bit keys
OVER_COPIES, OVER_CACHE = Form(is_cut=True, tiles="tall"), Form(tiles="tall")


def unsupported(call: AttentionCall) -> str | None:
    """Why a call that Hopper's kernel can take cannot be unpacked, or never should be."""
    if not support.converts(call) or support.is_float8(call) or call.q.dtype != torch.bfloat16:
        return "nothing is converted to bfloat16"
    if call.block_table is None or has_rows(call) or call.layout is not None:
        return "keys are in no pages, or in blocks of a layout"
    if call.is_batch_invariant or call.q_descale is not None or call.result_dtype.itemsize != 2:
        return "the kernel for 16 bits has other arguments"
    if support.is_bound(call.window_size_left):
        return "a window hides keys"
    if call.head_dim != call.head_dim_v or call.head_dim not in (64, 128):
        return "of these head_dims nothing was measured"
    by_token = is_by_token(call.k_descale, call.batch)
    if by_token != is_by_token(call.v_descale, call.batch):
        return "keys and values have other scales"
    if call.total_q - call.batch + 1 < least_queries(call.group_size):
        return "queries are few"
    is_room = support.key_bound(call) * bytes_of_key(call) <= 2 * MOST_BYTES
    return None if is_room else "the block table has room for too many keys"


def bytes_of_key(call: AttentionCall) -> int:
    """Bytes of a key and its value in the workspace, of all heads."""
    return call.num_kv_heads * (2 * (call.head_dim + call.head_dim_v) + 8)


def capacity_of(call: AttentionCall) -> int:
    """Keys that the workspace has room for: a power of two, so that there are few sizes of it, or
    as many as the memory holds.
    """
    bound = support.key_bound(call) + BLOCK
    most = max(MOST_BYTES // bytes_of_key(call), bound)
    return cdiv(min(next_power_of_2(call.batch * bound), most), BLOCK) * BLOCK


class _Workspace:
    """The tensors of a workspace, which each call allocates."""

    def __init__(self, call: AttentionCall, capacity: int) -> None:
        shape, device = (call.num_kv_heads, capacity), call.q.device
        self._keys = Allocation((*shape, call.head_dim), torch.bfloat16, device)
        self._values = Allocation((*shape, call.head_dim_v), torch.bfloat16, device)
        self._scales = Allocation((2, *shape), torch.float32, device)
        # each at a multiple of 16 bytes
        self._lengths = Allocation((4, cdiv(call.batch, 4) * 4), torch.int32, device)
        self._batch = call.batch

    def __call__(self) -> tuple[Tensor, ...]:
        """Keys, values, their scales, and the lengths of `Unpacked`."""
        lengths = self._lengths()[:, : self._batch]
        return self._keys(), self._values(), *self._scales().unbind(), *lengths.unbind()


def _strides(call: AttentionCall, x: Tensor, scale: Tensor | None) -> UnpackStrides:
    page, head, slot = x.stride()[:3]
    if scale is None:
        return UnpackStrides(page, head, slot, 0, 0, 0)
    if is_by_token(scale, call.batch):
        return UnpackStrides(page, head, slot, *scale.stride())
    of_batch, of_head = [0, 0, *scale.stride()][-2:]
    return UnpackStrides(page, head, slot, of_batch, of_head, 0)


def _plan_unpacking(call: AttentionCall, capacity: int) -> Launch:
    target, bound = target_of(call.q.device), support.key_bound(call)
    assert call.block_table is not None  # `unsupported` refuses packed keys
    blocks = min(capacity, call.batch * (bound + BLOCK)) // BLOCK
    most = max(RESIDENT * target.multiprocessors // call.num_kv_heads, 1)
    return Launch(
        _unpack_kernel,
        (min(blocks, most), call.num_kv_heads),
        k_strides=_strides(call, call.k, call.k_descale),
        v_strides=_strides(call, call.v, call.v_descale),
        batch=call.batch,
        num_pages=call.k.shape[0],
        stride_table=call.block_table.stride(0),
        page_size=call.page_size,
        most_keys=bound,
        capacity=capacity,
        DIM=call.head_dim,
        DIM_V=call.head_dim_v,
        FORMAT="INT4" if is_int4(call.k) else stored_format(call.k.dtype, target),
        BY_TOKEN=is_by_token(call.k_descale, call.batch),
        LEAST=least_queries(call.group_size),
        BLOCK=BLOCK,
        WIDTH=WIDTH,
        num_warps=WARPS,
    )


def plan_attention(call: AttentionCall) -> Plan:
    """A plan for the given tensors of calls like this one, on Hopper."""
    target, capacity = target_of(call.q.device), capacity_of(call)
    workspace, unpack = _Workspace(call, capacity), _plan_unpacking(call, capacity)
    new_out = Allocation(
        (call.total_q, call.num_heads, call.head_dim_v), torch.bfloat16, call.q.device
    )
    new_lse = Allocation((call.num_heads, call.total_q), torch.float32, call.q.device)
    names = list(call.given_tensors())

    def of_copies(made: tuple[Any, ...]) -> dict[str, Any]:
        """Arguments of the launch over copied keys."""
        k, v, k_scale, v_scale = (x.transpose(0, 1) for x in made[:4])
        lengths = {"k_start": made[4], "seqused_k": made[5]}
        scales = {"k_descale": k_scale, "v_descale": v_scale}
        return {"k": k, "v": v, "block_table": None, "cu_seqlens_k": None, **scales, **lengths}

    def of_cache(lengths: Any) -> dict[str, Any]:
        """Arguments of a launch over the cache."""
        return {"cu_seqlens_k": None, "seqused_k": lengths}

    example = workspace()
    copied = dataclasses.replace(call, **of_copies(example), max_seqlen_k=0)
    few = dataclasses.replace(call, **of_cache(example[6]))
    over = dataclasses.replace(call, **of_cache(example[7]))
    start_copied = hopper.plan_launches(copied, None, form=OVER_COPIES, skips=True)
    start_few = portable.plan_few(few)
    start_over = None
    if call.batch * (support.key_bound(call) + BLOCK) > capacity:
        start_over = hopper.plan_launches(over, None, form=OVER_CACHE, skips=True)
    of_launches = [list(x.given_tensors()) for x in (copied, few)]
    has_out = call.out is not None

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, tensors, strict=True))
        out, lse = tensors[-1] if has_out else new_out(), new_lse()
        made = workspace()
        read = {name: given.get(name) for name in Unpacked._fields[:8]}
        read |= {name: as_stored(given[name], target)[0] for name in ("k", "v")}
        unpacked = Unpacked(*read.values(), *made)
        if unpack.is_ready:
            unpack.start(Unpacked(*[None if x is None else x.data_ptr() for x in unpacked]))
        else:
            unpack(unpacked)
        starts = [(start_copied, of_copies(made)), (start_few, of_cache(made[6]))]
        if start_over is not None:
            starts.insert(0, (start_over, of_cache(made[7])))
        for start, changed in starts:
            order = of_launches[0] if start is start_copied else of_launches[1]
            ordered = tuple([(given | changed)[name] for name in order])
            start(ordered, [x.data_ptr() for x in ordered], out, lse)
        return out, lse

    return run
