"""`merge_states_backward` on GPUs: a program has BLOCK_R rows (a token of one head each).

    w = exp(lse_part - lse)
    dout_part = w dout      dlse_part = w (dout . (out_part - out) + dlse)

Rows of a part that saw no key have gradients 0, whatever they contain.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.common.dequant import as_stored, decode, encode, stored_format
from torch_paged_attn.backends.triton.common.softmax import LOG2E
from torch_paged_attn.backends.triton.merges.merge_states import lse_strides
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan, PlannedOp
from torch_paged_attn.backends.triton.runtime.target import cdiv, next_power_of_2, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.ops.merge_states_backward import check


class PartPointers(NamedTuple):
    out: Any
    lse: Any
    dout: Any
    dlse: Any


class MergePointers(NamedTuple):
    """The merged results, their gradients, and the parts."""

    dout: Any
    dlse: Any
    out: Any
    lse: Any
    a: PartPointers
    b: PartPointers


class RowStrides(NamedTuple):
    """Strides in elements: of rows (tokens, heads, head_dim_v), and of lse (heads, tokens)."""

    token: Any
    head: Any
    dim: Any
    lse_head: Any  # None: total_q, see `lse_strides`
    lse_token: Any

    @classmethod
    def of(cls, rows: Tensor, lse: Tensor | None) -> "RowStrides":
        return cls(*rows.stride(), *((None, None) if lse is None else lse_strides(lse)))


class MergeStrides(NamedTuple):
    dout: RowStrides
    out: RowStrides
    a: RowStrides
    b: RowStrides


class Rows(NamedTuple):
    """The rows of a program, a token of one head each; `exists` is False past the last one."""

    index: Any
    token: Any
    head: Any
    exists: Any
    total_q: Any


class Merged(NamedTuple):
    """The merged results and their gradients in a program's rows."""

    dout: Any
    dlse: Any
    out: Any
    lse: Any


class MergeOptions(NamedTuple):
    HEAD_DIM_V: int
    WIDTH: int
    BLOCK_R: int


@triton.jit
def _load_lse(ptr, rows, strides, counts):
    stride_head = strides.lse_head
    if stride_head is None:
        stride_head = rows.total_q
    at = rows.head * stride_head + rows.token * strides.lse_token
    return tl.load(ptr + at, mask=counts, other=float("-inf"))


@triton.jit
def _load_rows(ptr, rows, strides, counts, FORMAT: tl.constexpr, OPTIONS: tl.constexpr):
    dims = tl.arange(0, OPTIONS.WIDTH)
    at = rows.token * strides.token + rows.head * strides.head
    at = at[:, None] + (dims * strides.dim)[None, :]
    inside = counts[:, None] & (dims < OPTIONS.HEAD_DIM_V)[None, :]
    return decode(tl.load(ptr + at, mask=inside, other=0), FORMAT, tl.float32)


@triton.jit
def _write_part(part, strides, rows, merged, FORMAT: tl.constexpr, OPTIONS: tl.constexpr):
    lowest = float("-inf")
    part_lse = _load_lse(part.lse, rows, strides, rows.exists)
    counts = rows.exists & (tl.abs(part_lse) != float("inf")) & (merged.lse != lowest)
    weight = tl.where(counts, tl.exp2((part_lse - merged.lse) * LOG2E), 0.0)
    out = _load_rows(part.out, rows, strides, counts, FORMAT, OPTIONS)
    share = weight * (tl.sum(merged.dout * (out - merged.out), 1) + merged.dlse)
    at = rows.head * rows.total_q + rows.token
    tl.store(part.dlse + at, tl.where(counts, share, 0.0), mask=rows.exists)
    share = tl.where(counts[:, None], weight[:, None] * merged.dout, 0.0)
    stored = encode(share, part.dout.dtype.element_ty, FORMAT)
    dims = tl.arange(0, OPTIONS.WIDTH)
    at = (rows.index * OPTIONS.HEAD_DIM_V)[:, None] + dims[None, :]
    inside = rows.exists[:, None] & (dims < OPTIONS.HEAD_DIM_V)[None, :]
    tl.store(part.dout + at, stored, mask=inside)


@triton.jit(do_not_specialize=("total_q",))
def _merge_backward_kernel(
    pointers,
    total_q,
    num_heads,
    strides,
    FORMAT: tl.constexpr,
    PART_FORMAT: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * OPTIONS.BLOCK_R + tl.arange(0, OPTIONS.BLOCK_R)
    token, head = index // num_heads, index % num_heads
    rows = Rows(index, token, head, token < total_q, total_q)
    lse = _load_lse(pointers.lse, rows, strides.out, rows.exists)
    counts = rows.exists & (lse != float("-inf"))
    dlse = 0.0
    if pointers.dlse is not None:
        dlse = tl.where(counts, _load_lse(pointers.dlse, rows, strides.dout, counts), 0.0)
    dout = _load_rows(pointers.dout, rows, strides.dout, counts, FORMAT, OPTIONS)
    out = _load_rows(pointers.out, rows, strides.out, counts, FORMAT, OPTIONS)
    merged = Merged(dout, dlse, out, lse)
    _write_part(pointers.a, strides.a, rows, merged, PART_FORMAT, OPTIONS)
    _write_part(pointers.b, strides.b, rows, merged, PART_FORMAT, OPTIONS)


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
    launch = Launch(
        _merge_backward_kernel,
        (cdiv(total_q * num_heads, block_r),),
        total_q=total_q,
        num_heads=num_heads,
        strides=MergeStrides(
            RowStrides.of(dout, dlse),
            RowStrides.of(out, softmax_lse),
            RowStrides.of(out_a, lse_a),
            RowStrides.of(out_b, lse_b),
        ),
        FORMAT=stored_format(out.dtype, target),
        PART_FORMAT=stored_format(out_a.dtype, target),
        OPTIONS=MergeOptions(head_dim_v, width, block_r),
    )

    has_dlse = dlse is not None

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, ...]:
        made = tuple(new() for new in new_results)
        if not is_empty:
            if not has_dlse:
                tensors = tensors[0], None, *tensors[1:]
            dout, dlse, out_a, lse_a, out_b, lse_b, out, lse, *results = (
                x if x is None else as_stored(x, target)[0] for x in (*tensors, *made)
            )
            a = PartPointers(out_a, lse_a, *results[:2])
            b = PartPointers(out_b, lse_b, *results[2:])
            launch(MergePointers(dout, dlse, out, lse, a, b))
        return made

    return run


# with the arguments of the op `merge_states_backward`
merge_states_backward = PlannedOp("merge_states_backward", _plan)
