"""Native Sparse Attention (arXiv 2502.11089) with the arguments of fla's `parallel_nsa`, by
`selected_attention`, `selected_mass` and `flash_varlen`.

    from torch_paged_attn.integrations.fla import native_sparse_attention
"""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.integrations import _constants
from torch_paged_attn.integrations._arguments import check_tensors
from torch_paged_attn.ops import flash_varlen, selected_attention, selected_mass
from torch_paged_attn.ops.checks import check_dim, check_shape, fail, refuse
from torch_paged_attn.ops.selected_checks import SELECT_SIZES

__all__ = ["native_sparse_attention"]

NAME = "native_sparse_attention"


def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    g_swa: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_counts: Tensor | int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
) -> Tensor:
    """The gated sum of attention to compressed keys, to selected blocks and to a window.

    Args:
        q: (B, T, HQ, K)
        k, v: (B, T, H, K) and (B, T, H, V); H divides HQ
        g_cmp: (B, T, HQ), gates of attention to the means of finished blocks. If it is given, that
            attention selects the blocks, and block_indices has to be None: the own block and the
            best of the others by the probabilities, summed over the heads of a group
        g_slc: the same of the selected blocks; None: 1
        g_swa: the same of the window; needed with window_size > 0
        block_indices: (B, T, H, S) ints, blocks of each query; negative ones name none. Needed
            without g_cmp
        block_counts: how many blocks of each query count, the own one among them, an int or
            (B, T, H) ints
        block_size: 1 or a power of two up to 256
        window_size: keys of the window, the own one among them; 0: no window
        scale: None: 1 / sqrt(K)
        cu_seqlens: (N + 1,) ints, bounds of packed sequences; B is 1 then

    Returns:
        (B, T, HQ, V), with gradients of q, k, v and the gates.

    Raises:
        NotImplementedError: head_first.
        ValueError: an argument outside the above.
    """
    if head_first:
        refuse(NAME, "head_first=True is not supported", "pass tensors of (B, T, heads, head_dim)")
    check_tensors(NAME, q=q, k=k, v=v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dim(NAME, name, x, "(B, T, heads, head_dim)")
    batch, tokens, num_heads, _ = q.shape
    groups = k.shape[2]
    if block_size not in SELECT_SIZES:
        expected = f"one of {', '.join(map(str, SELECT_SIZES))}"
        fail(NAME, "block_size", f"{block_size}", expected)
    if cu_seqlens is not None and batch != 1:
        fail(NAME, "q", f"a batch of {batch}", "a batch of 1 with cu_seqlens")
    gates = {"g_cmp": g_cmp, "g_slc": g_slc, "g_swa": g_swa}
    for name, gate in gates.items():
        if gate is not None:
            check_shape(NAME, name, gate, (batch, tokens, num_heads), "(B, T, HQ)")
    if (g_swa is None) == (window_size > 0):
        expected = "a tensor with window_size > 0" if g_swa is None else "None with window_size 0"
        fail(NAME, "g_swa", "None" if g_swa is None else "a tensor", expected)
    if (g_cmp is None) == (block_indices is None):
        given = "both" if block_indices is not None else "neither"
        fail(NAME, "block_indices", given, "a tensor without g_cmp, and None with g_cmp")
    bounds = _constants.multiples(tokens, batch, q) if cu_seqlens is None else cu_seqlens.int()
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    if isinstance(block_counts, Tensor):
        check_shape(NAME, "block_counts", block_counts, (batch, tokens, groups), "(B, T, H)")
        block_counts = block_counts.flatten(0, 1)
    elif block_counts < 1:
        fail(NAME, "block_counts", f"{block_counts}", "at least 1")
    out = None
    if g_cmp is not None:
        out, lists = _compressed(q, k, v, bounds, tokens, block_counts, block_size, scale)
        out = out * g_cmp.flatten(0, 1)[..., None]
    else:
        assert block_indices is not None
        check_dim(NAME, "block_indices", block_indices, "(B, T, H, S)")
        shape = batch, tokens, groups, block_indices.shape[3]
        check_shape(NAME, "block_indices", block_indices, shape, "(B, T, H, S)")
        lists = block_indices.flatten(0, 1).int()
    counts = None
    if isinstance(block_counts, Tensor):
        counts = block_counts.clamp(0, lists.shape[2]).int()
    else:
        lists = lists[..., :block_counts].contiguous()
    selected, _ = selected_attention(
        q,
        k,
        v,
        lists,
        bounds,
        num_selected=counts,
        select_size=block_size,
        softmax_scale=scale,
    )
    if g_slc is not None:
        selected = selected * g_slc.flatten(0, 1)[..., None]
    out = selected if out is None else out + selected
    if g_swa is not None:
        left = window_size - 1
        window, _ = flash_varlen(
            q, k, v, bounds, causal=True, window_size_left=left, softmax_scale=scale
        )
        out = out + window * g_swa.flatten(0, 1)[..., None]
    return out.unflatten(0, (batch, tokens))


def _compressed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    tokens: int,
    block_counts: Tensor | int,
    size: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Attention to the means of finished blocks, and the blocks that it selects, the best ones
    first: (rows, HQ, V) and (rows, H, n) int32. No length is read on the host.

    tokens: of the longest sequence, at most
    """
    rows, groups, most = q.shape[0], k.shape[1], tokens // size
    blocks = bounds.diff() // size  # finished ones of each sequence
    block_bounds = torch.nn.functional.pad(blocks.cumsum(0, dtype=torch.int32), (1, 0))
    block = torch.arange(rows // size, device=q.device, dtype=torch.int32)
    sequence = _part_of(block, block_bounds)
    first = bounds[sequence] + (block - block_bounds[sequence]) * size
    # numbers behind the last block, of which no list is read, may be those of any tokens
    keys = (first[:, None] + torch.arange(size, device=q.device)).clamp(0, max(rows - 1, 0))
    short_k, short_v = (x[keys].mean(1, dtype=torch.float32).to(x.dtype) for x in (k, v))

    row = torch.arange(rows, device=q.device, dtype=torch.int32)
    position = row - bounds[_part_of(row, bounds)]
    every = torch.arange(most, device=q.device, dtype=torch.int32)
    every = every.expand(rows, groups, most).contiguous()
    finished = ((position + 1) // size)[:, None].expand(rows, groups).contiguous()
    options: dict[str, Any] = {"softmax_scale": scale, "causal": False}
    options["num_selected"] = finished.clamp(max=most)
    lists = every, bounds, block_bounds
    out, lse = selected_attention(q, short_k, short_v, *lists, **options)
    shares = selected_mass(q.detach(), short_k.detach(), lse.detach(), *lists, **options)

    own = (position // size)[:, None, None].expand(rows, groups, 1)
    shares = shares.masked_fill(every >= own, -1.0)
    count = most if isinstance(block_counts, Tensor) else min(block_counts - 1, most)
    best = shares.topk(count, -1)
    others = best.indices.int().masked_fill(best.values < 0, -1)
    return out, torch.cat([own, others], -1)


def _part_of(row: Tensor, bounds: Tensor) -> Tensor:
    """The sequence of each row; the last one behind all."""
    found = torch.searchsorted(bounds[1:].contiguous(), row, right=True)
    return found.clamp(max=max(bounds.shape[0] - 2, 0))
