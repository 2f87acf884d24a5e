"""`merge_states` on GPUs: a program merges BLOCK_R rows (a token of one head each) of all parts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.common.dequant import as_stored, decode, encode, stored_format
from torch_paged_attn.backends.triton.common.softmax import LOG2E, finite_or_zero
from torch_paged_attn.backends.triton.portable.common.named import named
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan, PlannedOp
from torch_paged_attn.backends.triton.runtime.target import cdiv, next_power_of_2, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.ops.merge_states import check, check_list

# the most parts of one launch, whose arguments are limited to 4 KB
MOST_PARTS = 64


@triton.jit
def _weight(lse, shift):
    return tl.exp2((lse - shift) * LOG2E)


@triton.jit
def _weighted(out_ptr, offset, inside, weight, FORMAT: tl.constexpr):
    """A part's rows times their weights. Rows of weight 0 are not read, since they may be NaN."""
    counts = inside & (weight > 0.0)[:, None]
    out = decode(tl.load(out_ptr + offset, mask=counts, other=0), FORMAT, tl.float32)
    return out * weight[:, None]


class MergeOptions(NamedTuple):
    HEAD_DIM_V: int
    WIDTH: int  # its next power of two
    FORMAT: Any  # how parts are stored
    OUT_FORMAT: Any
    BLOCK_R: int


def lse_strides(lse: Tensor) -> tuple[int | None, int]:
    """Strides of head and token of `(num_heads, total_q)`. That of a head is None if it is total_q,
    as is usual: Triton compiles for the divisors of numbers in a tuple, and this one changes from
    call to call.
    """
    head, token = lse.stride()
    return None if head == lse.shape[1] else head, token


@triton.jit
def _merge_rows(
    outs, lses, out_ptr, lse_ptr, total_q, num_heads, strides, OPTIONS: tl.constexpr
):  # fmt: skip
    """Merge a program's rows of all parts. `strides` has those of token, head and dim of each
    `out`, and then those of head and token of each lse; None for a head's that is total_q.
    """
    HEAD_DIM_V: tl.constexpr = OPTIONS.HEAD_DIM_V
    WIDTH: tl.constexpr = OPTIONS.WIDTH
    BLOCK_R: tl.constexpr = OPTIONS.BLOCK_R
    FORMAT: tl.constexpr = OPTIONS.FORMAT
    OUT_FORMAT: tl.constexpr = OPTIONS.OUT_FORMAT
    PARTS: tl.constexpr = len(outs)
    BEHIND: tl.constexpr = 3 * PARTS
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = r // num_heads, r % num_heads
    exists = token < total_q
    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    found = ()
    for i in tl.static_range(PARTS):
        stride_head = strides[BEHIND + 2 * i]
        if stride_head is None:
            stride_head = total_q
        at = lses[i] + head * stride_head + token * strides[BEHIND + 2 * i + 1]
        lse = tl.load(at, mask=exists, other=float("-inf"))
        # FlashAttention-2 gives +inf to a row that saw no key
        lse = tl.where(lse == float("inf"), float("-inf"), lse)
        found += (lse,)  # type: ignore[assignment]
        m = tl.maximum(m, found[i])
    shift = finite_or_zero(m)
    total = tl.zeros([BLOCK_R], tl.float32)
    for i in tl.static_range(PARTS):
        total += _weight(found[i], shift)
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), m + tl.log(divisor))
    tl.store(lse_ptr + head * total_q + token, lse, mask=exists)

    dims = tl.arange(0, WIDTH)
    inside = exists[:, None] & (dims < HEAD_DIM_V)[None, :]
    merged = tl.zeros([BLOCK_R, WIDTH], tl.float32)
    for i in tl.static_range(PARTS):
        row = token * strides[3 * i] + head * strides[3 * i + 1]
        at = row[:, None] + (dims * strides[3 * i + 2])[None, :]
        merged += _weighted(outs[i], at, inside, _weight(found[i], shift) / divisor, FORMAT)
    stored = encode(merged, out_ptr.dtype.element_ty, OUT_FORMAT)
    tl.store(out_ptr + (r * HEAD_DIM_V)[:, None] + dims[None, :], stored, mask=inside)


@triton.jit(do_not_specialize=("total_q", "stride_lse_a_head", "stride_lse_b_head"))
def _merge_kernel(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr, total_q, num_heads,
    stride_out_a_token, stride_out_a_head, stride_out_a_dim, stride_lse_a_head, stride_lse_a_token,
    stride_out_b_token, stride_out_b_head, stride_out_b_dim, stride_lse_b_head, stride_lse_b_token,
    HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Merge two parts. Arguments are not in tuples, because kernels in graphs take none, and
    because Triton would compile for the divisors of strides that change from call to call.
    """
    OPTIONS: tl.constexpr = named("HEAD_DIM_V WIDTH FORMAT OUT_FORMAT BLOCK_R")(
        HEAD_DIM_V=HEAD_DIM_V, WIDTH=WIDTH, FORMAT=FORMAT, OUT_FORMAT=FORMAT, BLOCK_R=BLOCK_R
    )
    strides = (
        stride_out_a_token, stride_out_a_head, stride_out_a_dim,
        stride_out_b_token, stride_out_b_head, stride_out_b_dim,
        stride_lse_a_head, stride_lse_a_token, stride_lse_b_head, stride_lse_b_token,
    )  # fmt: skip
    _merge_rows(
        (out_a_ptr, out_b_ptr), (lse_a_ptr, lse_b_ptr), out_ptr, lse_ptr, total_q, num_heads,
        strides, OPTIONS,
    )  # fmt: skip


def _plan(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Plan:
    check(out_a, lse_a, out_b, lse_b)
    total_q, num_heads, head_dim_v = out_a.shape
    is_empty = total_q * num_heads == 0
    new_out = Allocation.like(out_a)
    new_lse = Allocation.like(lse_a)
    target = target_of(out_a.device)
    width = next_power_of_2(max(head_dim_v, 1))
    block_r = max(1, 2048 // width)
    # in the order of the kernel's arguments
    strides = *out_a.stride(), *lse_a.stride(), *out_b.stride(), *lse_b.stride()
    names = (name for name in _merge_kernel.arg_names if name.startswith("stride"))
    launch = Launch(
        _merge_kernel,
        (cdiv(total_q * num_heads, block_r),),
        total_q=total_q,
        num_heads=num_heads,
        **dict(zip(names, strides, strict=True)),
        HEAD_DIM_V=head_dim_v,
        WIDTH=width,
        FORMAT=stored_format(out_a.dtype, target),
        BLOCK_R=block_r,
    )

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        if is_empty:
            return out, lse
        if launch.is_ready:
            launch.start(*addresses, out.data_ptr(), lse.data_ptr())
        else:
            out_a, lse_a, out_b, lse_b = tensors
            a, b, stored = (as_stored(x, target)[0] for x in (out_a, out_b, out))
            launch(a, lse_a, b, lse_b, stored, lse)
        return out, lse

    return run


# with the arguments of the op `merge_states`
merge_states = PlannedOp("merge_states", _plan)


@triton.jit(do_not_specialize=("total_q",))
def _merge_list_kernel(
    outs, lses, out_ptr, lse_ptr, total_q, num_heads, strides, OPTIONS: tl.constexpr
):  # fmt: skip
    """Merge any number of parts, see `_merge_rows`."""
    _merge_rows(outs, lses, out_ptr, lse_ptr, total_q, num_heads, strides, OPTIONS)


def merge_states_list(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Arguments as in the op `merge_states.list`. More than MOST_PARTS are merged in groups."""
    if len(outs) <= MOST_PARTS and len(outs) == len(lses):
        options = {"out_dtype": out_dtype}
        return launch_cache.call("merge_states.list", _plan_list, (*outs, *lses), options)
    check_list(outs, lses, out_dtype=out_dtype)
    groups = [slice(i, i + MOST_PARTS) for i in range(0, len(outs), MOST_PARTS)]
    merged = [merge_states_list(outs[g], lses[g], out_dtype=torch.float32) for g in groups]
    found, found_lse = zip(*merged, strict=True)
    return merge_states_list(found, found_lse, out_dtype=out_dtype or outs[0].dtype)


def _plan_list(*tensors: Tensor, out_dtype: torch.dtype | None) -> Plan:
    number = len(tensors) // 2
    outs, lses = tensors[:number], tensors[number:]
    check_list(outs, lses, out_dtype=out_dtype)
    total_q, num_heads, head_dim_v = outs[0].shape
    dtype = out_dtype or outs[0].dtype
    is_empty = total_q * num_heads == 0
    new_out = Allocation(outs[0].shape, dtype, outs[0].device)
    new_lse = Allocation.like(lses[0])
    target = target_of(outs[0].device)
    width = next_power_of_2(max(head_dim_v, 1))
    block_r = max(1, 1024 // width)
    launch = Launch(
        _merge_list_kernel,
        (cdiv(total_q * num_heads, block_r),),
        total_q=total_q,
        num_heads=num_heads,
        strides=(
            *(stride for x in outs for stride in x.stride()),
            *(stride for x in lses for stride in lse_strides(x)),
        ),
        OPTIONS=MergeOptions(
            HEAD_DIM_V=head_dim_v,
            WIDTH=width,
            FORMAT=stored_format(outs[0].dtype, target),
            OUT_FORMAT=stored_format(dtype, target),
            BLOCK_R=block_r,
        ),
    )

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        if is_empty:
            return out, lse
        if launch.is_ready:
            parts = tuple(addresses[:number]), tuple(addresses[number:])
            launch.start(*parts, out.data_ptr(), lse.data_ptr())
        else:
            parts = tuple(as_stored(x, target)[0] for x in tensors[:number]), tensors[number:]
            launch(*parts, as_stored(out, target)[0], lse)
        return out, lse

    return run
