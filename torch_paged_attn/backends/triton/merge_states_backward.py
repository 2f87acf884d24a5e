"""`merge_states_backward` on GPUs: one program has BLOCK_R rows (a query token of one head each).

    w = exp(lse_part - lse)
    dout_part = w dout      dlse_part = w (dout . (out_part - out) + dlse)

A part without weight has gradients 0, whatever it holds.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.dequant import as_stored, decode, encode, stored_format
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import next_power_of_2, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.backends.triton.softmax import LOG2E
from torch_paged_attn.ops.merge_states_backward import check


class MergePointers(NamedTuple):
    """What the kernel reads, and its results."""

    dout: Any
    dlse: Any
    out_a: Any
    lse_a: Any
    out_b: Any
    lse_b: Any
    out: Any
    lse: Any
    dout_a: Any
    dlse_a: Any
    dout_b: Any
    dlse_b: Any


class LseStrides(NamedTuple):
    """Strides in elements of the four tensors (heads, tokens)."""

    a_head: Any
    a_token: Any
    b_head: Any
    b_token: Any
    head: Any
    token: Any
    d_head: Any
    d_token: Any


class RowStrides(NamedTuple):
    """Strides in elements of rows of (tokens, heads, head_dim_v)."""

    token: Any
    head: Any
    dim: Any


@triton.jit
def _load_row(ptr, token, head, strides, counts, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr,
              FORMAT: tl.constexpr):  # fmt: skip
    dims = tl.arange(0, WIDTH)
    at = (token * strides.token + head * strides.head)[:, None] + (dims * strides.dim)[None, :]
    inside = counts[:, None] & (dims < HEAD_DIM_V)[None, :]
    return decode(tl.load(ptr + at, mask=inside, other=0), FORMAT, tl.float32)


@triton.jit
def _write_part(
    part_ptr, part_lse, strides, dout_ptr, dlse_ptr, dout, dlse, out, lse, r, token, head, total_q,
    num_heads, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """The gradients of one part."""
    exists = token < total_q
    counts = exists & (part_lse != float("-inf")) & (lse != float("-inf"))
    weight = tl.where(counts, tl.exp2((part_lse - lse) * LOG2E), 0.0)
    part = _load_row(part_ptr, token, head, strides, counts, HEAD_DIM_V, WIDTH, FORMAT)
    share = tl.where(counts, weight * (tl.sum(dout * (part - out), 1) + dlse), 0.0)
    tl.store(dlse_ptr + head * total_q + token, share, mask=exists)
    share = tl.where(counts[:, None], weight[:, None] * dout, 0.0)
    dims = tl.arange(0, WIDTH)
    stored = encode(share, dout_ptr.dtype.element_ty, FORMAT)
    inside = exists[:, None] & (dims < HEAD_DIM_V)[None, :]
    tl.store(dout_ptr + (r * HEAD_DIM_V)[:, None] + dims[None, :], stored, mask=inside)


@triton.jit(do_not_specialize=("total_q",))
def _merge_backward_kernel(
    pointers,
    total_q,
    num_heads,
    dout_strides,
    a_strides,
    b_strides,
    out_strides,
    lse_strides,
    HEAD_DIM_V: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    PART_FORMAT: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = r // num_heads, r % num_heads
    exists = token < total_q
    lowest = float("-inf")
    at = head * lse_strides.a_head + token * lse_strides.a_token
    lse_a = tl.load(pointers.lse_a + at, mask=exists, other=lowest)
    at = head * lse_strides.b_head + token * lse_strides.b_token
    lse_b = tl.load(pointers.lse_b + at, mask=exists, other=lowest)
    at = head * lse_strides.head + token * lse_strides.token
    lse = tl.load(pointers.lse + at, mask=exists, other=lowest)
    counts = exists & (lse != lowest)
    dlse = 0.0
    if pointers.dlse is not None:
        at = head * lse_strides.d_head + token * lse_strides.d_token
        dlse = tl.load(pointers.dlse + at, mask=counts, other=0.0)
    dout = _load_row(pointers.dout, token, head, dout_strides, counts, HEAD_DIM_V, WIDTH, FORMAT)
    out = _load_row(pointers.out, token, head, out_strides, counts, HEAD_DIM_V, WIDTH, FORMAT)
    _write_part(
        pointers.out_a, lse_a, a_strides, pointers.dout_a, pointers.dlse_a, dout, dlse, out, lse,
        r, token, head, total_q, num_heads, HEAD_DIM_V, WIDTH, PART_FORMAT,
    )  # fmt: skip
    _write_part(
        pointers.out_b, lse_b, b_strides, pointers.dout_b, pointers.dlse_b, dout, dlse, out, lse,
        r, token, head, total_q, num_heads, HEAD_DIM_V, WIDTH, PART_FORMAT,
    )  # fmt: skip


def merge_states_backward(*tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments as in the op's schema."""
    return launch_cache.call("merge_states_backward", _plan, tensors, {})


def _plan(
    dout: Tensor,
    dlse: Tensor | None,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
) -> Plan:
    check(dout, dlse, out_a, lse_a, out_b, lse_b, out, softmax_lse)
    total_q, num_heads, head_dim_v = out.shape
    is_empty = total_q * num_heads == 0
    target = target_of(out.device)
    new_results = [Allocation.like(x) for x in (out_a, lse_a, out_b, lse_b)]
    width = next_power_of_2(max(head_dim_v, 1))
    block_r = max(1, 2048 // width)
    a, b, whole = lse_a.stride(), lse_b.stride(), softmax_lse.stride()
    of_dlse = (None, None) if dlse is None else dlse.stride()
    launch = Launch(
        _merge_backward_kernel,
        (triton.cdiv(total_q * num_heads, block_r),),
        total_q=total_q,
        num_heads=num_heads,
        dout_strides=RowStrides(*dout.stride()),
        a_strides=RowStrides(*out_a.stride()),
        b_strides=RowStrides(*out_b.stride()),
        out_strides=RowStrides(*out.stride()),
        lse_strides=LseStrides(*a, *b, *whole, *of_dlse),
        HEAD_DIM_V=head_dim_v,
        WIDTH=width,
        FORMAT=stored_format(out.dtype, target),
        PART_FORMAT=stored_format(out_a.dtype, target),
        BLOCK_R=block_r,
    )

    has_dlse = dlse is not None

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, ...]:
        made = tuple(new() for new in new_results)
        if not is_empty:
            if not has_dlse:
                tensors = tensors[0], None, *tensors[1:]
            pointers = (x if x is None else as_stored(x, target)[0] for x in (*tensors, *made))
            launch(MergePointers(*pointers))
        return made

    return run
