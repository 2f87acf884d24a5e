"""The sparse attention of vLLM's MiniMax M3, by `selected_attention`, on every device that has it.

    from torch_paged_attn.integrations.minimax_m3 import minimax_m3_sparse_attn

A page of the cache is a block of the selection: 128 keys in vLLM, any `select_size` here. Any
number of heads and any head_dim is allowed. Queries with nothing selected have results of 0.
"""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.integrations import _constants
from torch_paged_attn.integrations._arguments import check_tensors
from torch_paged_attn.ops import selected_attention
from torch_paged_attn.ops.checks import check_dim, check_shape, fail

__all__ = ["minimax_m3_sparse_attn", "minimax_m3_sparse_attn_decode"]


@torch.no_grad()
def minimax_m3_sparse_attn(
    q: Tensor,
    kv_cache: Tensor,
    topk_idx: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    prefix_lens: Tensor,
    max_query_len: int,
    num_kv_heads: int,
    sm_scale: float,
    output: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Causal attention of each query to the blocks that its KV head's list names, into `output`.

    Args:
        q: (total_q, num_heads, head_dim)
        kv_cache: (num_blocks, num_kv_heads, block, 2 * head_dim), values behind keys; 16 bits or 8
        topk_idx: (num_kv_heads, total_q, topk) int32, blocks of each query's sequence; negative
            ones name none
        block_table: (batch, max_blocks) int32
        cu_seqlens_q: (batch + 1,) int32
        seq_lens: (batch,) int32, keys of each sequence
        prefix_lens: (batch,) int32, the position of each sequence's first query
        max_query_len: a hint
        num_kv_heads: that of kv_cache
        sm_scale: factor of the logits
        output: (total_q, num_heads, head_dim), written. There are no gradients
        k_scale, v_scale: of a cache of 8 bits, both or none: float32, one number or
            (num_kv_heads, at least num_blocks * block), one for each slot

    Raises:
        ValueError: an argument outside the above.
    """
    name = "minimax_m3_sparse_attn"
    check_tensors(name, q=q, cu_seqlens_q=cu_seqlens_q, prefix_lens=prefix_lens)
    tables: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q,
        "seqused_k": seq_lens,
        "q_position": prefix_lens,
    }
    tables |= {"block_table": block_table, "key_indices": topk_idx}
    _attend(name, q, kv_cache, tables, max_query_len, num_kv_heads, sm_scale, output,
            k_scale, v_scale)  # fmt: skip


@torch.no_grad()
def minimax_m3_sparse_attn_decode(
    q: Tensor,
    kv_cache: Tensor,
    topk_idx: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    num_kv_heads: int,
    sm_scale: float,
    output: Tensor,
    decode_query_len: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    token_to_req_indices: Tensor | None = None,
) -> None:
    """`minimax_m3_sparse_attn` of the last queries of each sequence.

    Args:
        q: (total_q, num_heads, head_dim)
        kv_cache, topk_idx, block_table, seq_lens: as there
        num_kv_heads, sm_scale, output, k_scale, v_scale: as there
        decode_query_len: queries of each sequence; with query_start_loc the most of any
        query_start_loc: (batch + 1,) int32, where the queries of each sequence start
        token_to_req_indices: (at least total_q,), given with query_start_loc, from which it
            follows: it is not read

    Raises:
        ValueError: an argument outside the above.
    """
    name = "minimax_m3_sparse_attn_decode"
    check_tensors(name, q=q, seq_lens=seq_lens)
    batch = seq_lens.shape[0]
    bounds = query_start_loc
    if bounds is None:
        if q.shape[0] != batch * decode_query_len:
            given = f"{decode_query_len} for {q.shape[0]} queries of {batch} sequences"
            fail(name, "decode_query_len", given, "total_q / batch without query_start_loc")
        bounds = _constants.multiples(decode_query_len, batch, q)
    else:
        check_shape(name, "query_start_loc", bounds, (batch + 1,), "(batch + 1,)")
        check_tensors(name, token_to_req_indices=token_to_req_indices)
        assert token_to_req_indices is not None
        if token_to_req_indices.shape[0] < q.shape[0]:
            given = f"shape {tuple(token_to_req_indices.shape)}"
            fail(name, "token_to_req_indices", given, f"(at least total_q = {q.shape[0]},)")
    tables: dict[str, Any] = {"cu_seqlens_q": bounds, "seqused_k": seq_lens}
    tables |= {"block_table": block_table, "key_indices": topk_idx}
    _attend(name, q, kv_cache, tables, decode_query_len, num_kv_heads, sm_scale, output,
            k_scale, v_scale)  # fmt: skip


def _attend(
    name: str,
    q: Tensor,
    kv_cache: Tensor,
    tables: dict[str, Any],
    max_query_len: int,
    num_kv_heads: int,
    sm_scale: float,
    output: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Write the result of either function; tables by the operator's names, lists as given."""
    lists, block_table = tables["key_indices"], tables["block_table"]
    check_tensors(name, kv_cache=kv_cache, topk_idx=lists, block_table=block_table, output=output)
    check_dim(name, "q", q, "(total_q, num_heads, head_dim)")
    check_dim(name, "kv_cache", kv_cache, "(num_blocks, num_kv_heads, block, 2 * head_dim)")
    num_blocks, heads, block, _ = kv_cache.shape
    form = "(num_blocks, num_kv_heads, block, 2 * head_dim)"
    check_shape(name, "kv_cache", kv_cache, (num_blocks, num_kv_heads, block, 2 * q.shape[2]), form)
    check_dim(name, "topk_idx", lists, "(num_kv_heads, total_q, topk)")
    shape = heads, q.shape[0], lists.shape[2]
    check_shape(name, "topk_idx", lists, shape, "(num_kv_heads, total_q, topk)")
    check_shape(name, "output", output, tuple(q.shape), "(total_q, num_heads, head_dim)")
    k, v = kv_cache.chunk(2, -1)
    scales: dict[str, Any] = {}
    if (k_scale is None) != (v_scale is None):
        missing = "k_scale" if k_scale is None else "v_scale"
        fail(name, missing, "None", "a tensor beside the other of the two")
    for argument, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            scales[f"{argument[0]}_descale"] = _descale(name, argument, scale, kv_cache)
    out, _ = selected_attention(
        **tables | {"key_indices": lists.transpose(0, 1).int()},
        q=q,
        k=k,
        v=v,
        **scales,
        max_seqlen_q=max_query_len,
        select_size=block,
        softmax_scale=sm_scale,
        causal=True,
        out_dtype=output.dtype,
    )
    output.copy_(out)


def _descale(name: str, argument: str, scale: Tensor, kv_cache: Tensor) -> Tensor:
    """A scale, or one for each slot `(num_blocks, num_kv_heads, block)`."""
    num_blocks, heads, block, _ = kv_cache.shape
    if kv_cache.element_size() != 1:
        fail(name, argument, "a tensor", "None for a cache of 16 bits")
    if scale.numel() == 1:
        return scale.reshape(())
    slots = num_blocks * block
    if scale.dim() != 2 or scale.shape[0] != heads or scale.shape[1] < slots:
        expected = f"one number or (num_kv_heads, at least num_blocks * block) = ({heads}, {slots})"
        fail(name, argument, f"shape {tuple(scale.shape)}", expected)
    return scale[:, :slots].unflatten(1, (num_blocks, block)).transpose(0, 1)
