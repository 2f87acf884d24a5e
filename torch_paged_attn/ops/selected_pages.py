"""`selected_attention` to whole pages, as calls of `flash_varlen`: for backends that have no kernel
for lists.

Each query token becomes a sequence of its own, with one query, whose pages are those that its list
names, in ascending order. Of these the last alone may be cut, by Lk or by the token's position, as
the last page of any sequence may. With a list for each KV head, each token and head is a sequence,
and each page of a head a page. No tensor value is read on the host.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, key_lengths
from torch_paged_attn.ops.checks import refuse
from torch_paged_attn.ops.selected_checks import sequence_of
from torch_paged_attn.selection import NOT_SELECTED

Attend = Callable[[AttentionCall], tuple[Tensor, Tensor]]

NOTHING = 2**31 - 1  # behind all units
DESCALES = "q_descale", "k_descale", "v_descale"


def unsupported(call: AttentionCall) -> str | None:
    """Why a valid call is not attention to whole pages, or None."""
    assert call.selection is not None
    size = call.selection.select_size
    if not call.is_paged:
        return "k is packed; supported: pages, with select_size = page_size"
    if size != call.page_size:
        return f"select_size is {size} with a page_size of {call.page_size}; supported: equal ones"
    if call.window_size_left >= 0:
        return f"window_size_left is {call.window_size_left}; supported: -1"
    return None


def attend_pages(
    call: AttentionCall,
    backend: str,
    attend: Attend,
    find: "Callable[[AttentionCall], NamedPages] | None" = None,
) -> tuple[Tensor, Tensor]:
    """Results of a checked call, by `attend` of calls of `flash_varlen`.

    find: what a backend has in place of `named_pages`; None: nothing

    Raises NotImplementedError, which names the argument, for what is `unsupported`.
    """
    if (reason := unsupported(call)) is not None:
        refuse(call.op, f"not supported by the {backend} backend: {reason}")
    if call.total_q == 0 or call.batch == 0:
        out, lse = call.new_results()
        return out.zero_(), lse.fill_(float("-inf"))
    return attend_named(call, (find or named_pages)(call), attend)


@dataclasses.dataclass(frozen=True)
class NamedPages:
    """What the lists of a call name.

    table: `(total_q, G, K)` int32, page ids, those that count first
    lengths: `(total_q, G)` int32, the visible keys in these pages
    sequence: `(total_q,)`, each token's
    num_rows: `()` int32, the rows that are no padding
    """

    table: Tensor
    lengths: Tensor
    sequence: Tensor
    num_rows: Tensor

    def to(self, device: torch.device) -> "NamedPages":
        return NamedPages(*(getattr(self, x.name).to(device) for x in dataclasses.fields(self)))


def named_pages(call: AttentionCall) -> NamedPages:
    """The pages that the lists of a call name; reads its lists, lengths and block_table alone."""
    selection, size = call.selection, call.page_size
    assert selection is not None
    units, counts = selection.key_indices, selection.num_selected
    total_q, groups, entries = units.shape
    sequence = sequence_of(call, slice(0, total_q))
    limit = _visible_keys(call, sequence)[:, None, None]
    is_named = (units >= 0) & (units < (limit + size - 1) // size)
    if counts is not None:
        place = torch.arange(entries, device=units.device, dtype=torch.int32)
        is_named = is_named & (place < counts[..., None])
    units = torch.where(is_named, units, NOTHING).sort(-1).values
    is_named = units < NOTHING
    units = torch.where(is_named, units, 0)
    visible = torch.where(is_named, (limit - units * size).clamp(max=size), 0)
    # a unit that is listed twice and cut counts once: only the last page may be cut
    again = torch.zeros_like(is_named)
    again[..., 1:] = units[..., 1:] == units[..., :-1]
    visible = torch.where(again & (visible < size), 0, visible)
    if call.block_table is None:
        table = units
    elif call.block_table.shape[1] == 0:  # no unit has a visible key
        table = torch.zeros_like(units)
    else:
        table = call.block_table[sequence[:, None, None], units]
    if entries == 0:
        table = table.new_zeros(total_q, groups, 1)
    return NamedPages(table.int(), visible.sum(-1).int(), sequence, call.cu_seqlens_q[-1])


def _visible_keys(call: AttentionCall, sequence: Tensor) -> Tensor:
    """How many keys from the first one on each token sees, `(total_q,)` int32; of a cache whose
    units have no positions, all.
    """
    if call.is_slots:
        keys = min(call.k.shape[0] * call.page_size, NOTHING - call.page_size)
        return torch.full_like(sequence, keys, dtype=torch.int32)
    lengths = key_lengths(call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k).long()[sequence]
    if call.window_right < 0:
        return lengths.int()
    row = torch.arange(len(sequence), device=sequence.device)
    position = call.first_positions()[sequence] + row - call.cu_seqlens_q.long()[sequence]
    return torch.minimum(lengths, position + call.window_right + 1).clamp(min=0).int()


def attend_named(call: AttentionCall, pages: NamedPages, attend: Attend) -> tuple[Tensor, Tensor]:
    """Results of a call whose lists name `pages`."""
    total_q, groups, _ = pages.table.shape
    if groups == 1:
        return attend(_of_tokens(call, pages, slice(None), pages.table[:, 0], pages.lengths[:, 0]))
    if call.sinks is None and _has_joint_rows(call.k) and _has_joint_rows(call.v):
        out, lse = attend(_of_heads(call, pages))
        out = out.reshape(total_q, call.num_heads, call.head_dim_v)
        lse = lse.unflatten(1, (total_q, groups)).permute(2, 0, 1).reshape(-1, total_q)
        return out, lse.contiguous()
    # the heads' sinks differ, or their pages are no pages of one cache
    parts = [
        attend(_of_tokens(call, pages, slice(h, h + 1), pages.table[:, h], pages.lengths[:, h]))
        for h in range(groups)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 0)


def _has_joint_rows(cache: Tensor) -> bool:
    """Whether the heads of all pages are as many pages of one head, at one distance."""
    return cache.stride(0) == cache.shape[1] * cache.stride(1)


def _of_tokens(
    call: AttentionCall, pages: NamedPages, kv_heads: slice, table: Tensor, lengths: Tensor
) -> AttentionCall:
    """Each token as a sequence, for some KV heads."""
    group = call.group_size
    heads = slice(None)
    if kv_heads.start is not None:
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
    changed: dict[str, Any] = {}
    for name in DESCALES:
        if (scale := getattr(call, name)) is not None and scale.dim() == 3:
            scale = scale[:, kv_heads]  # by token
        elif scale is not None and scale.dim():
            scale = scale[..., kv_heads]
            scale = scale[pages.sequence] if scale.dim() == 2 else scale
        changed[name] = scale
    if call.sinks is not None:
        changed["sinks"] = call.sinks[heads]
    changed |= {"q": call.q[:, heads], "k": call.k[:, kv_heads], "v": call.v[:, kv_heads]}
    return _one_query_each(call, pages, 1, table=table, lengths=lengths, **changed)


def _of_heads(call: AttentionCall, pages: NamedPages) -> AttentionCall:
    """Each token and KV head as a sequence, each page of a head as a page."""
    total_q, groups, entries = pages.table.shape
    head = torch.arange(groups, device=pages.table.device, dtype=torch.int32)[:, None]
    changed: dict[str, Any] = {}
    for name in DESCALES:
        if (scale := getattr(call, name)) is not None and scale.dim() == 3:
            scale = scale.flatten(0, 1)[:, None]  # by token
        elif scale is not None and scale.dim():
            by_token = scale[pages.sequence] if scale.dim() == 2 else scale.expand(total_q, -1)
            scale = by_token.reshape(-1, 1)
        changed[name] = scale
    changed["q"] = call.q.reshape(total_q * groups, call.group_size, call.head_dim)
    changed |= {name: getattr(call, name).flatten(0, 1)[:, None] for name in ("k", "v")}
    table = (pages.table * groups + head).reshape(-1, entries)
    lengths = pages.lengths.reshape(-1)
    return _one_query_each(call, pages, groups, table=table, lengths=lengths, **changed)


def _one_query_each(
    call: AttentionCall,
    pages: NamedPages,
    rows_of_token: int,
    *,
    table: Tensor,
    lengths: Tensor,
    **changed: Any,
) -> AttentionCall:
    """A call of `flash_varlen` whose every row of q is a sequence."""
    rows = torch.arange(len(lengths) + 1, device=table.device, dtype=torch.int32)
    given = {
        name: x
        for name, x in call.given().items()
        if name not in (*NOT_SELECTED, "key_indices", "num_selected", "select_size", "q_position")
    }
    given |= {
        "cu_seqlens_q": torch.minimum(rows, pages.num_rows * rows_of_token),
        "cu_seqlens_k": None,
        "max_seqlen_q": 1,
        "max_seqlen_k": table.shape[1] * call.page_size,
        "seqused_k": lengths,
        "block_table": table,
        "causal": False,
        "window_size_right": -1,
    }
    return AttentionCall.flash_varlen(**given | changed)
