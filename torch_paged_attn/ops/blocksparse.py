"""Contract of `paged_attn::blocksparse`: attention that visits only the blocks of a layout."""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, key_lengths
from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.accepted import operator_of
from torch_paged_attn.ops.attention_checks import check_attention, check_attention_values
from torch_paged_attn.ops.attention_gradients import AttentionDerivative
from torch_paged_attn.ops.checks import check_dtype, fail
from torch_paged_attn.ops.flash_varlen import fill_hints, refuse_twice
from torch_paged_attn.ops.kinds import call_operator
from torch_paged_attn.ops.paths import public
from torch_paged_attn.ops.signature import described, schema

BLOCK_SIZES = (16, 32, 64, 128, 256)


def check(*args: Any, **kwargs: Any) -> None:
    """Raise for metadata that the contract forbids."""
    check_call(AttentionCall.blocksparse(*args, **kwargs))


def check_call(call: AttentionCall) -> None:
    """The same of a call that was made of the arguments."""
    check_attention(call)
    check_layout(call)


def check_layout(call: AttentionCall) -> None:
    """Raise for a layout whose metadata the contract forbids, of a call that is otherwise valid."""
    assert call.layout is not None
    op, crow, col = call.op, call.layout.crow_indices, call.layout.col_indices
    for name in ("q_block_size", "k_block_size"):
        if (size := getattr(call.layout, name)) not in BLOCK_SIZES:
            fail(op, name, size, f"one of {', '.join(map(str, BLOCK_SIZES))}")
    for name, tensor, last in (("crow_indices", crow, "rows + 1"), ("col_indices", col, "nnz")):
        check_dtype(op, name, tensor, (torch.int32,))
        if tensor.dim() not in (2, 3):
            fail(op, name, f"shape {tuple(tensor.shape)}", f"(H, {last}) or (batch, H, {last})")
    if crow.shape[:-1] != col.shape[:-1]:
        expected = f"{tuple(crow.shape[:-1])} + (nnz,), as crow_indices"
        fail(op, "col_indices", f"shape {tuple(col.shape)}", expected)
    if crow.shape[-1] == 0:
        fail(op, "crow_indices.shape[-1]", 0, "rows + 1, at least 1")
    if crow.dim() == 3 and crow.shape[0] != call.batch:
        fail(op, "crow_indices.shape[0]", crow.shape[0], f"batch = {call.batch}")
    if crow.shape[-2] not in (1, call.num_kv_heads, call.num_heads):
        expected = f"1, num_kv_heads = {call.num_kv_heads} or num_heads = {call.num_heads}"
        fail(op, "crow_indices.shape[-2]", crow.shape[-2], expected)


def check_values(*args: Any, **kwargs: Any) -> None:
    """Raise for lengths, page ids and layout entries out of range. Reads tensors on the host."""
    check_layout_values(AttentionCall.blocksparse(*args, **kwargs))


def check_layout_values(call: AttentionCall) -> None:
    """Raise for forbidden values in the call's tensors, those of its layout included."""
    check_attention_values(call)
    assert call.layout is not None
    query_lens = call.cu_seqlens_q.diff().tolist()
    key_lens = key_lengths(call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k).tolist()
    firsts = call.first_positions().tolist()
    for b, (query_len, key_len) in enumerate(zip(query_lens, key_lens, strict=True)):
        positions = range(max(0, firsts[b]), firsts[b] + query_len)
        if key_len and positions:
            _check_rows(call, b, positions)


def _check_rows(call: AttentionCall, b: int, positions: range) -> None:
    """Raise for forbidden values in the layout's rows that belong to queries at these positions."""
    op, layout = call.op, call.layout
    assert layout is not None
    rows, nnz = layout.crow_indices.shape[-1] - 1, layout.col_indices.shape[-1]
    first, last = positions[0] // layout.q_block_size, positions[-1] // layout.q_block_size
    if last >= rows:
        where = f"Lk[{b}] = {positions.stop}"
        if call.q_position is not None:
            where = f"position {positions[-1]} of sequence {b}"
        expected = f"at least {last + 1}, for {where} and q_block_size = {layout.q_block_size}"
        fail(op, "rows of crow_indices", rows, expected)
    crow, col = (t[b] if t.dim() == 3 else t for t in (layout.crow_indices, layout.col_indices))
    for h in range(crow.shape[0]):
        bounds = crow[h].tolist()
        for row in range(first, last + 1):
            if not 0 <= bounds[row] <= bounds[row + 1] <= nnz:
                got = f"{bounds[row]} and {bounds[row + 1]} for row {row} of head {h}"
                fail(op, "crow_indices", got, f"nondecreasing and at most nnz = {nnz}")
            columns = col[h, bounds[row] : bounds[row + 1]].tolist()
            if min(columns, default=0) < 0:
                got = f"{min(columns)} in row {row} of head {h}"
                fail(op, "col_indices", got, "at least 0", IndexError)
            if len(set(columns)) < len(columns):
                got = f"a column twice in row {row} of head {h}"
                fail(op, "col_indices", got, "unique within each row")


def fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Empty results of the op's shapes and dtypes."""
    return AttentionCall.blocksparse(*args, **kwargs).new_results()


_blocksparse = operator_of(
    define(
        schema("blocksparse"),
        check=check,
        check_values=check_values,
        fake=fake,
        call=AttentionCall.blocksparse,
        has_plan=True,
        derivative=AttentionDerivative("blocksparse"),
        autocast=True,
    )
)


@public
@described
def blocksparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    crow_indices: Tensor,
    col_indices: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    *tensors: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`flash_varlen` over a block-sparse layout; cost follows the number of listed blocks.

    The layout is CSR over blocks of POSITIONS: a query at position `p` belongs to row
    `p // q_block_size`, key `j` to column `j // k_block_size`, in prefill, chunked prefill and
    decode alike. A key is visible when its block is listed and every mask of `flash_varlen` lets
    it through. A query at a negative position (more queries than keys) sees nothing.

    Args:
        {arguments}

    Results and errors are those of `flash_varlen`. On the CPU, a layout with too few rows, with
    decreasing bounds or with a repeated column raises ValueError, one with a negative column
    IndexError.
    `torch_paged_attn.layouts` builds layouts.

    Sources: BigBird (arXiv 2007.14062), Phi-3 (arXiv 2404.14219), section 2.
    """
    if tensors and options:
        refuse_twice("blocksparse", tensors, options)
    first = q, k, v, crow_indices, col_indices, cu_seqlens_q, cu_seqlens_k
    hints = fill_hints(q, k, block_table, max_seqlen_q, max_seqlen_k)
    args = *first, *hints, seqused_k, block_table, *tensors
    return call_operator(_blocksparse, args, options)
