"""Keys and values of 8 bits and int4 in 16 bits, once for all tiles of a call with many queries.

Each tile of 128 queries would convert all keys that it sees. Instead, one launch copies the pages
of the call's sequences into a workspace, in which each sequence is one page: the numbers as they
are stored, which bfloat16 has exactly, and beside them a scale for each token and head. The kernel
for 16 bits reads the workspace, and multiplies scores and probabilities by the scales.

The workspace has room for what the block table could hold. Where that is more than MOST_BYTES, KV
heads are attended to in parts, one after the other, which share a workspace.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, is_by_token, is_int4
from torch_paged_attn.backends.triton.common.dequant import as_stored, decode, stored_format
from torch_paged_attn.backends.triton.common.int4 import decode_two
from torch_paged_attn.backends.triton.common.page_sizes import has_rows
from torch_paged_attn.backends.triton.dispatch import kernels
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.forward import plan as hopper
from torch_paged_attn.backends.triton.hopper.forward.choices import FORM
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import cdiv, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation

# bytes of a workspace
MOST_BYTES = 512 << 20
# keys of a program's turn, its warps, and programs to a multiprocessor
BLOCK, WARPS, RESIDENT = 64, 4, 8


class Unpacked(NamedTuple):
    """The tensors of the kernel."""

    k: Any  # (num_pages, num_kv_heads, page_size, width)
    v: Any
    k_descale: Any
    v_descale: Any
    block_table: Any
    seqused_k: Any
    new_k: Any  # (batch, heads, keys, dim)
    new_v: Any
    new_k_descale: Any  # (batch, heads, keys)
    new_v_descale: Any
    new_table: Any  # (batch, 1): each sequence has one page


class UnpackStrides(NamedTuple):
    """Strides in elements."""

    page: int
    head: int
    slot: int
    scale_page: int  # of the batch, if scales are by head
    scale_head: int
    scale_slot: int


@triton.jit
def _unpack_rows(x_ptr, new_ptr, row, inside, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Rows at offsets `row[0]` of the cache to rows at offsets `row[1]` of the workspace."""
    if FORMAT == "INT4":
        d = tl.arange(0, DIM // 2)
        x = tl.load(x_ptr + row[0][:, None] + d[None, :], mask=inside[:, None])
        even, odd = decode_two(x, tl.float32)
        x = tl.reshape(tl.join(even, odd), [x.shape[0], DIM])
    else:
        d = tl.arange(0, DIM)
        x = tl.load(x_ptr + row[0][:, None] + d[None, :], mask=inside[:, None])
        x = decode(x, FORMAT, tl.float32)
    d = tl.arange(0, DIM)
    tl.store(new_ptr + row[1][:, None] + d[None, :], x.to(tl.bfloat16), mask=inside[:, None])


@triton.jit
def _scales(ptr, b, page, slot, head, inside, strides, BY_TOKEN: tl.constexpr):
    if ptr is None:
        return tl.full(slot.shape, 1.0, tl.float32)
    at = head * strides.scale_head + tl.zeros_like(slot)
    if BY_TOKEN:
        at += page * strides.scale_page + slot * strides.scale_slot
    else:
        at += b * strides.scale_page
    return tl.load(ptr + at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=("num_pages", "stride_table", "page_size", "room", "first_head"))
def _unpack_kernel(
    pointers, k_strides, v_strides, num_pages, stride_table, page_size, room, first_head,
    DIM: tl.constexpr, DIM_V: tl.constexpr, FORMAT: tl.constexpr, BY_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    if (tl.program_id(0) == 0) & (head == 0):
        tl.store(pointers.new_table + b, tl.program_id(2))
    key_len = tl.minimum(tl.load(pointers.seqused_k + b), room)
    table = pointers.block_table + b * stride_table
    for start in range(tl.program_id(0) * BLOCK, key_len, tl.num_programs(0) * BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = j < key_len
        page = tl.load(table + j // page_size, mask=inside, other=0)
        # a bad id that nobody checked reads the last page: wrong, but inside the cache
        page = tl.minimum(page.to(tl.uint32), (num_pages - 1).to(tl.uint32)).to(tl.int64)
        slot = (j % page_size).to(tl.int64)
        old = first_head + head
        new = (b * heads + head) * room + j
        row = page * k_strides.page + old * k_strides.head + slot * k_strides.slot, new * DIM
        _unpack_rows(pointers.k, pointers.new_k, row, inside, DIM, FORMAT)
        row = page * v_strides.page + old * v_strides.head + slot * v_strides.slot, new * DIM_V
        _unpack_rows(pointers.v, pointers.new_v, row, inside, DIM_V, FORMAT)
        k_scale = _scales(pointers.k_descale, b, page, slot, old, inside, k_strides, BY_TOKEN)
        v_scale = _scales(pointers.v_descale, b, page, slot, old, inside, v_strides, BY_TOKEN)
        tl.store(pointers.new_k_descale + new, k_scale, mask=inside)
        tl.store(pointers.new_v_descale + new, v_scale, mask=inside)


# rows of queries of a sequence's KV head from which on converting once is worth its time, where
# scales are by token: on an H200, 4 chunks of 512 queries behind 7,680 keys took 0.71 of the time,
# and 8,192 queries 0.58. With scales by head, keys are converted faster, and it is worth it later.
LEAST_ROWS, LEAST_ROWS_BY_HEAD = 1024, 8192


def unprofitable(call: AttentionCall) -> str | None:
    """Why a call that Hopper's kernel can take is better not unpacked, or cannot be; None if it is
    to be.
    """
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
    rows = support.mean_length(call) * call.group_size
    if rows < (LEAST_ROWS if by_token else LEAST_ROWS_BY_HEAD):
        return "queries are few"
    return None if heads_at_once(call) else "the block table has room for too many keys"


def heads_at_once(call: AttentionCall) -> int:
    """KV heads whose keys and values have room in a workspace; 0 if not even one's have."""
    keys = call.batch * support.key_bound(call)
    of_head = keys * (2 * (call.head_dim + call.head_dim_v) + 8)
    most = min(MOST_BYTES // max(of_head, 1), call.num_kv_heads)
    return most and cdiv(call.num_kv_heads, cdiv(call.num_kv_heads, most))


class _Workspace:
    """The tensors of `heads` KV heads' workspace, which each call allocates."""

    def __init__(self, call: AttentionCall, heads: int) -> None:
        keys, device = support.key_bound(call), call.q.device
        shape = call.batch, heads, keys
        numbers = torch.bfloat16, device
        self.parts = (
            Allocation((*shape, call.head_dim), *numbers),
            Allocation((*shape, call.head_dim_v), *numbers),
            Allocation(shape, torch.float32, device),
            Allocation(shape, torch.float32, device),
            Allocation((call.batch, 1), torch.int32, device),
        )

    def __call__(self) -> tuple[Tensor, ...]:
        return tuple([x() for x in self.parts])


def _strides(call: AttentionCall, x: Tensor, scale: Tensor | None) -> UnpackStrides:
    page, head, slot = x.stride()[:3]
    if scale is None:
        return UnpackStrides(page, head, slot, 0, 0, 0)
    if is_by_token(scale, call.batch):
        return UnpackStrides(page, head, slot, *scale.stride())
    of_batch, of_head = [0, 0, *scale.stride()][-2:]
    return UnpackStrides(page, head, slot, of_batch, of_head, 0)


def plan_attention(call: AttentionCall, longest: int = 0) -> Plan:
    """A plan for the given tensors of calls like this one, on Hopper. `longest`: the hint
    max_seqlen_q, or 0."""
    heads = heads_at_once(call)
    workspace = _Workspace(call, heads)
    room, names = support.key_bound(call), list(call.given_tensors())
    assert call.block_table is not None  # `unprofitable` refuses packed keys
    target = target_of(call.q.device)
    programs = min(cdiv(room, BLOCK), max(RESIDENT * target.multiprocessors // heads, 1))
    new_out = Allocation(call.new_results()[0].shape, call.result_dtype, call.q.device)
    new_lse = Allocation((call.num_heads, call.total_q), torch.float32, call.q.device)
    replaced = "k", "v", "k_descale", "v_descale", "block_table"
    example = dict(zip(replaced, workspace(), strict=True))
    of_example, group = new_out(), call.group_size
    parts = []
    for first in range(0, call.num_kv_heads, heads):
        count = min(heads, call.num_kv_heads - first)
        rows = slice(first * group, (first + count) * group)
        given: dict[str, Any] = {n: x[:, :count] for n, x in example.items() if n != "block_table"}
        given |= {"q": call.q[:, rows], "block_table": example["block_table"]}
        if call.sinks is not None:
            given["sinks"] = call.sinks[rows]
        part = dataclasses.replace(call, **given)
        way = kernels.way_of(part, longest, None)
        form = FORM if way is None or way.form is None or way.form.tiles != "tall" else way.form
        start = hopper.plan_launches(part, of_example[:, rows], form=form)
        unpack = Launch(
            _unpack_kernel,
            (programs, count, call.batch),
            k_strides=_strides(call, call.k, call.k_descale),
            v_strides=_strides(call, call.v, call.v_descale),
            num_pages=call.k.shape[0],
            stride_table=call.block_table.stride(0),
            page_size=call.page_size,
            room=room,
            first_head=first,
            DIM=call.head_dim,
            DIM_V=call.head_dim_v,
            FORMAT="INT4" if is_int4(call.k) else stored_format(call.k.dtype, target),
            BY_TOKEN=is_by_token(call.k_descale, call.batch),
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
        order = list(part.given_tensors())
        parts.append((count, rows, start, unpack, order))

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, tensors, strict=True))
        out, lse = new_out(), new_lse()
        made = workspace()
        unpacked = Unpacked(
            as_stored(given["k"], target)[0],
            as_stored(given["v"], target)[0],
            given.get("k_descale"),
            given.get("v_descale"),
            given["block_table"],
            given["seqused_k"],
            *made,
        )
        for count, rows, start, unpack, order in parts:
            unpack(unpacked)
            of_part = given | {
                n: x if n == "block_table" else x[:, :count]
                for n, x in zip(replaced, made, strict=True)
            }
            of_part["q"] = given["q"][:, rows]
            if "sinks" in given:
                of_part["sinks"] = given["sinks"][rows]
            ordered = tuple([of_part[x] for x in order])
            start(ordered, tuple([x.data_ptr() for x in ordered]), out[:, rows], lse[rows])
        return out, lse

    return run
