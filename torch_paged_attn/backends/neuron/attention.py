"""`flash_varlen` on Neuron: from a checked call to tables, a launch, and the op's layout again.

The work list is built on the host and the lengths are read there: on a device that is a wait.
"""

import os
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_paged_attn.backends.neuron import attention_kernel as engine
from torch_paged_attn.backends.neuron.bias import lay_out_bias
from torch_paged_attn.backends.neuron.row_scalars import row_scalars
from torch_paged_attn.backends.neuron.stored_rows import StoredRows, stored_rows
from torch_paged_attn.backends.neuron.toolchain import launch, nl, num_programs
from torch_paged_attn.ops.checks import (
    FLOAT,
    check_attention,
    check_attention_values,
    key_lengths,
    names,
)
from torch_paged_attn.planning.work_list import WorkList, build_work_list, visible_range

P = engine.P
WIDEST_VALUE = 512  # float32 in one bank of PSUM
WIDEST_KEY = 1024
KEY_TILES = (512, 256, 128)

# caches of these are widened on the chip; NKI's e4m3 ends at 240 before the fourth generation
EIGHT_BITS = (torch.float8_e5m2, torch.int8)

# bytes of a partition of SBUF that an item's keys and values may take
KEY_BYTES = 96 * 1024

# instructions of more items than this would not be unrolled
UNROLLED_ITEMS = 256

# float32 counts exactly to here
EXACT = 2**24


def unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    out_dtype: torch.dtype | None = None,
    **_rest: Any,
) -> str | None:
    """What of a valid call has no kernel yet: the argument, what came, what is supported."""
    num_kv_heads, head_dim, head_dim_v = k.shape[1], k.shape[-1], v.shape[-1]
    if q.dtype not in FLOAT:
        return f"q has dtype {names((q.dtype,))}; supported: {names(FLOAT)}"
    if k.dtype not in (q.dtype, *EIGHT_BITS):
        return f"k has dtype {names((k.dtype,))}; supported: {names((q.dtype, *EIGHT_BITS))}"
    if (out_dtype or q.dtype) not in FLOAT:
        return f"out_dtype is {out_dtype}; supported: {names(FLOAT)}"
    if dropout_p > 0.0:
        return f"dropout_p is {dropout_p}; supported: 0"
    if head_dim > WIDEST_KEY:
        return f"k has head_dim {head_dim}; supported: at most {WIDEST_KEY}"
    if head_dim_v > WIDEST_VALUE:
        return f"v has head_dim {head_dim_v}; supported: at most {WIDEST_VALUE}"
    if num_kv_heads % num_programs():
        return f"k has {num_kv_heads} heads; supported: a multiple of {num_programs()} (LNC)"
    if num_kv_heads * (head_dim + head_dim_v) * k.itemsize > KEY_BYTES * num_programs():
        return f"k and v have {num_kv_heads} heads of {head_dim}: too much for one tile of SBUF"
    return None


def refuse(op: str, reason: str) -> NoReturn:
    """Raise for what the contract allows and this backend does not do yet."""
    raise NotImplementedError(f"paged_attn::{op}: Neuron: {reason}")


def blocksparse(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Not written yet."""
    refuse("blocksparse", "crow_indices has no kernel yet; supported: flash_varlen")


def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_scale: Tensor | None = None,
    rng_state: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.flash_varlen`."""
    arguments = dict(locals())
    check_attention("flash_varlen", **arguments)
    if os.environ.get("PAGED_ATTN_CHECK", "0") == "1":
        check_attention_values("flash_varlen", **arguments)
    reason = unsupported(**arguments)
    if reason is not None:
        refuse("flash_varlen", reason)

    total_q, num_heads, head_dim = q.shape
    num_kv_heads, head_dim_v = k.shape[1], v.shape[-1]
    group_size = num_heads // num_kv_heads
    out_dtype = out_dtype or q.dtype
    if total_q == 0:
        return (
            q.new_empty(0, num_heads, head_dim_v, dtype=out_dtype),
            q.new_empty(num_heads, 0, dtype=torch.float32),
        )

    key_lens = key_lengths(cu_seqlens_q, cu_seqlens_k, seqused_k)
    tile_k = _tile_k(num_kv_heads * (head_dim + head_dim_v) * k.itemsize // num_programs())
    items = build_work_list(
        cu_seqlens_q,
        key_lens,
        total_q,
        group_size=group_size,
        tile_q=P,
        tile_k=tile_k,
        causal=causal,
        window_size_left=window_size_left,
        window_size_right=window_size_right,
    )
    k_rows, v_rows = (_rows(x, block_table is not None) for x in (k, v))
    run = _run(k, k_rows, v_rows, tile_k) if block_table is not None else 1
    run = run if attn_bias is None else 1
    starts = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    page, slot = _key_slots(items, run, block_table, starts, k)
    num_rows = total_q * group_size
    indices, bounds = _tables(items, num_rows, k_rows.row_of(page, slot), v_rows.row_of(page, slot))
    bias, bias_head_stride = torch.zeros(1, tile_k, device=q.device), 0
    if attn_bias is not None:
        seen_by = visible_range(
            cu_seqlens_q, key_lens, total_q, causal, window_size_left, window_size_right
        )
        bias, bias_head_stride, bias_row, absent = lay_out_bias(
            attn_bias, items, group_size, *seen_by
        )
        indices, bounds = _append(indices, bias_row), _append(bounds, absent)
    q_rows = q.unflatten(1, (num_kv_heads, group_size)).transpose(1, 2)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    scale = scale / softcap if softcap > 0.0 else scale
    descales = (q_descale, k_descale, v_descale)
    out_rows, lse_rows = launch(
        engine.attention_kernel,
        q_rows.reshape(num_rows, num_kv_heads * head_dim),
        k_rows.storage,
        v_rows.storage,
        indices.to(q.device),
        bounds.to(q.device),
        row_scalars(
            sinks, alibi_slopes, descales, scale, cu_seqlens_q, total_q, num_kv_heads, group_size
        ),
        bias,
        num_kv_heads,
        k_rows.layout,
        v_rows.layout,
        tile_k // (P * run),
        run,
        float(scale),
        float(softcap),
        sinks is not None,
        alibi_slopes is not None,
        any(descale is not None for descale in descales),
        attn_bias is not None,
        bias_head_stride,
        names((out_dtype,)),
        len(indices) * num_kv_heads > UNROLLED_ITEMS and hasattr(nl, "fori_loop"),
    )
    out = out_rows[:num_rows].view(total_q, group_size, num_kv_heads, head_dim_v)
    lse = lse_rows[:num_rows].view(total_q, group_size, num_kv_heads)
    lse = lse.masked_fill(lse < engine.FLOOR / 2, float("-inf"))
    return (
        out.transpose(1, 2).reshape(total_q, num_heads, head_dim_v).contiguous(),
        lse.permute(2, 1, 0).reshape(num_heads, total_q).contiguous(),
    )


def _tile_k(bytes_per_key: int) -> int:
    """The longest tile of keys that fits: a partition holds one key of every P."""
    return next(n for n in KEY_TILES if n // P * bytes_per_key <= KEY_BYTES or n == KEY_TILES[-1])


def _rows(cache: Tensor, is_paged: bool) -> StoredRows:
    """Packed keys are one long page; without any, one that nobody sees."""
    pages = cache if is_paged else cache.transpose(0, 1)[None]
    if pages.numel() == 0:
        pages = pages.new_zeros(1, pages.shape[1], 1, pages.shape[3])
    rows = stored_rows(pages)
    assert rows is not None  # a copy is allowed
    return rows


def _run(k: Tensor, k_rows: StoredRows, v_rows: StoredRows, tile_k: int) -> int:
    """How many tokens one gathered row may span: those of a page that lie side by side."""
    if any(rows.slot_stride != rows.dim for rows in (k_rows, v_rows)):
        return 1
    return next(run for run in (4, 2, 1) if k.shape[2] % run == 0 and run * P <= tile_k)


def _key_slots(
    items: WorkList, run: int, block_table: Tensor | None, starts: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """Page and slot that each run of an item starts at, `(num_items, chunks, P)`.

    A run that nobody sees is replaced by one that somebody does: no other page is looked up.
    """
    first = torch.arange(0, items.tile_k, run).view(1, -1, P)
    low = items.key_start // run * run
    high = (items.key_stop - 1).clamp(min=0) // run * run
    key = items.first_key[:, None, None] + first.clamp(low[:, None, None], high[:, None, None])
    sees = items.key_start < items.key_stop
    page, slot = torch.zeros_like(key), torch.zeros_like(key)
    sequence, key = items.sequence[sees, None, None], key[sees]
    if block_table is None:
        slot[sees] = starts.cpu().long()[sequence] + key
        return page, slot
    table, page_size = block_table.cpu().long(), k.shape[2]
    if len(key):
        # ids nobody has checked must not read outside the cache
        column = (key // page_size).clamp(max=table.shape[1] - 1)
        page[sees] = table[sequence, column].clamp(0, k.shape[0] - 1)
        slot[sees] = key % page_size
    return page, slot


def bucket(num_items: int) -> int:
    """A size out of few, 2**n or 3 * 2**n: a new shape is a compilation."""
    power = 1 << (num_items - 1).bit_length()
    return power * 3 // 4 if power >= 4 and num_items <= power * 3 // 4 else power


def _tables(
    items: WorkList, num_rows: int, k_rows: Tensor, v_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """What the kernel loads with each item; padding items show no key and store to no row."""
    # results of rows that are not there, or not finished, go past the end, each to its own place
    nowhere = num_rows + torch.arange(P)
    result = items.rows.where(items.is_row & items.is_last[:, None], nowhere)
    keys = torch.cat([k_rows, v_rows], 1).transpose(1, 2)
    indices = torch.cat([torch.stack([items.rows, result], 2), keys], 2).to(torch.int32)
    per_item = (items.is_first, items.key_start, items.key_stop)
    first, key_start, key_stop = (x[:, None].expand(-1, P) for x in per_item)
    position = items.position.clamp(-EXACT, EXACT)
    columns = (items.row_start, items.row_stop, position, first, key_start, key_stop)
    bounds = torch.stack([column.float() for column in columns], 2)
    missing = bucket(items.num_items) - items.num_items
    if missing:
        idle = indices[:1].clone()
        idle[..., engine.RESULT] = nowhere
        indices = torch.cat([indices, idle.expand(missing, -1, -1)])
        bounds = F.pad(bounds, (0, 0, 0, 0, 0, missing))
    return indices, bounds


def _append(table: Tensor, columns: Tensor) -> Tensor:
    """More columns, `(num_items, P, n)`; padding items get zeros."""
    missing = len(table) - len(columns)
    return torch.cat([table, F.pad(columns, (0, 0, 0, 0, 0, missing)).to(table.dtype)], 2)
