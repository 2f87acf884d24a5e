"""flash-attn's functions on every device: the names, order and meaning of flash-attn 2.8.

>>> from torch_paged_attn.integrations.flash_attn import flash_attn_varlen_func

What comes on top is keyword-only and carries the names of FlashAttention-3, vLLM and SGLang:
seqused_k, s_aux (attention sinks), descales of 8-bit caches, out, page_table, ragged queries.

As in flash-attn: causal masks and windows are aligned to the bottom right, rows that see no key
are 0, softmax_lse is a natural logarithm in float32. Unlike flash-attn: any page size and head
size, window and causal together (causal clamps the right side to 0), and tensors of any strides
whose last one is 1. float8 queries answer in bfloat16 unless `out` says otherwise.

Accepted, without effect on any result: `max_seqlen_*` (hints; 0-d tensors are not read),
`deterministic` (every result is), `num_splits`, `pack_gqa`, `sm_margin`, `scheduler_metadata`,
`ver`. What is not offered raises NotImplementedError that names the argument. Wrong shapes, dtypes
and values raise what the ops raise.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_paged_attn.attention_call import defaults
from torch_paged_attn.integrations._kvcache import (
    behind_leftpad,
    check_room,
    end_to_end,
    multiples,
    positions,
    rotate,
    rows_as_pages,
    store,
)
from torch_paged_attn.ops import flash_varlen

Window: TypeAlias = tuple[int | None, int | None]
DEFAULTS = defaults("flash_varlen")
Result: TypeAlias = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    qv: Tensor | None = None,
    attention_chunk: int = 0,
) -> Result:
    """Attention over a batch of equally long sequences.

    q: (batch, seqlen_q, num_heads, head_dim)
    k, v: (batch, seqlen_k, num_kv_heads, head_dim), (..., head_dim_v)

    Returns out (batch, seqlen_q, num_heads, head_dim_v); with return_softmax_lse also softmax_lse
    (batch, num_heads, seqlen_q); with return_attn_probs (out, softmax_lse, None).
    """
    _refuse("flash_attn_func", qv=qv, attention_chunk=attention_chunk)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or tensor.shape[0] != q.shape[0]:
            raise ValueError(
                f"flash_attn_func: {name} must be (batch, seqlen, heads, head_dim) with q's batch, "
                f"got shape {tuple(tensor.shape)}"
            )
    batch, seqlen_q = q.shape[:2]
    seqlen_k = k.shape[1]
    cu_seqlens_q = multiples(seqlen_q, batch, q.device)
    cu_seqlens_k = multiples(seqlen_k, batch, q.device)
    block_table = None
    if (end_to_end(k) and end_to_end(v)) or k.requires_grad or v.requires_grad:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    else:
        # each sequence is a page: heads-first keys, as model caches keep them, are not copied
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        block_table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    result, lse = _attend(
        "flash_attn_func",
        q.flatten(0, 1),
        k,
        v,
        out=out,
        dropout_p=dropout_p,
        window_size=window_size,
        s_aux=s_aux,
        return_attn_probs=return_attn_probs,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=seqlen_q,
        max_seqlen_k=seqlen_k,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        softcap=softcap,
    )
    result, lse = _per_sequence(result, lse, batch, seqlen_q)
    return _returned("flash_attn_func", result, lse, out, return_attn_probs, return_softmax_lse)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    seqused_q: Tensor | None = None,
    qv: Tensor | None = None,
    attention_chunk: int = 0,
) -> Result:
    """Attention over sequences laid end to end, their keys packed or in pages.

    q: (total_q, num_heads, head_dim); rows past cu_seqlens_q[-1] are padding
    k, v: (total_k, num_kv_heads, head_dim), or with block_table (batch, max_pages) int32 pages
        (num_pages, page_size, num_kv_heads, head_dim); v may have a head_dim of its own
    cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32. With a block table cu_seqlens_k gives the key
        lengths unless seqused_k (batch,) int32 does; without one seqused_k cuts them short

    Returns out (total_q, num_heads, head_dim_v); with return_softmax_lse also softmax_lse
    (num_heads, total_q); with return_attn_probs (out, softmax_lse, None).
    """
    _refuse("flash_attn_varlen_func", seqused_q=seqused_q, qv=qv, attention_chunk=attention_chunk)
    if block_table is not None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    result, lse = _attend(
        "flash_attn_varlen_func",
        q,
        k,
        v,
        out=out,
        dropout_p=dropout_p,
        window_size=window_size,
        s_aux=s_aux,
        return_attn_probs=return_attn_probs,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_k=seqused_k,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        softcap=softcap,
    )
    return _returned(
        "flash_attn_varlen_func", result, lse, out, return_attn_probs, return_softmax_lse
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    attention_chunk: int = 0,
    deterministic: bool = False,
    scheduler_metadata: Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    ver: int = 3,
) -> Result:
    """Attention over a cache, to which new keys and values may be appended first, in place.

    q: (batch, seqlen_q, num_heads, head_dim), or with cu_seqlens_q (batch + 1,) int32 ragged,
        (total_q, num_heads, head_dim)
    k_cache, v_cache: (cache_batch, seqlen_cache, num_kv_heads, head_dim), or with block_table (or
        page_table) pages (num_pages, page_size, num_kv_heads, head_dim); neither is ever copied
    k, v: new (batch, seqlen_new, num_kv_heads, head_dim), or with cu_seqlens_k_new ragged; they
        go behind the cache_seqlens tokens of each sequence. 8-bit caches divide by the descales
    cache_seqlens: (batch,) int32 or an int, tokens in the cache BEFORE k; without k None means a
        full cache. A negative length marks a padding row: nothing of it is written
    cache_batch_idx: (batch,) int32, which cache row a sequence owns; not with a block table
    cache_leftpad: (batch,) int32, slots in front of each sequence's first key, counted by
        cache_seqlens; for caches whose rows lie end to end, which are read slot by slot
    rotary_cos, rotary_sin: (>= cache length, rotary_dim / 2), only with k. k is rotated to the
        positions it is stored at, and q to the same ones, or, neither causal nor local, all of it
        to the first

    Returns out of q's shape, but v's head_dim; with return_softmax_lse also softmax_lse
    (batch, num_heads, seqlen_q), ragged (num_heads, total_q).
    """
    name = "flash_attn_with_kvcache"
    _refuse(name, qv=qv, rotary_seqlens=rotary_seqlens, attention_chunk=attention_chunk)
    if page_table is not None and block_table is not None:
        raise ValueError(f"{name}: block_table and page_table are one argument, got both")
    table = page_table if block_table is None else block_table
    if (k is None) != (v is None):
        raise ValueError(f"{name}: k and v must come together, got one of them")
    if (rotary_cos is None) != (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise ValueError(f"{name}: rotary_cos and rotary_sin must come together, and with k and v")
    if q.dim() != (4 if cu_seqlens_q is None else 3):
        raise ValueError(
            f"{name}: q must be (batch, seqlen_q, num_heads, head_dim), or (total_q, num_heads, "
            f"head_dim) with cu_seqlens_q, got shape {tuple(q.shape)}"
        )

    ragged = cu_seqlens_q is not None
    shape, device = q.shape, q.device
    if cu_seqlens_q is None:
        cu_seqlens_q, max_seqlen_q = multiples(shape[1], shape[0], device), shape[1]
        q = q.flatten(0, 1)
    batch = cu_seqlens_q.shape[0] - 1
    if table is not None and cache_batch_idx is not None:
        raise NotImplementedError(f"{name}: cache_batch_idx is not offered with a block_table")
    if table is None:
        table = rows_as_pages(k_cache, cache_batch_idx, batch)
    capacity = table.shape[1] * k_cache.shape[1]
    if cache_seqlens is None:
        if k is not None:
            raise ValueError(f"{name}: cache_seqlens must be given with k and v")
        cache_seqlens = capacity
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)

    seqused_k = cache_seqlens
    if k is not None and v is not None:
        if cu_seqlens_k_new is None:
            if k.dim() != 4 or k.shape[0] != batch or v.shape[:2] != k.shape[:2]:
                raise ValueError(
                    f"{name}: k and v must be (batch, seqlen_new, num_kv_heads, head_dim) with "
                    f"batch {batch}, got shapes {tuple(k.shape)} and {tuple(v.shape)}"
                )
            cu_seqlens_k_new = multiples(k.shape[1], batch, device)
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        seqused_k = cache_seqlens + cu_seqlens_k_new.diff()
        check_room(seqused_k, capacity)
        sequence, position = positions(cu_seqlens_k_new, cache_seqlens, k.shape[0])
        if rotary_cos is not None and rotary_sin is not None:
            if rotary_cos.shape[0] < capacity:
                raise ValueError(
                    f"{name}: rotary_cos must have a row for each of the cache's {capacity} "
                    f"positions, got {rotary_cos.shape[0]}"
                )
            k = rotate(k, position, rotary_cos, rotary_sin, rotary_interleaved)
            owner, q_position = positions(cu_seqlens_q, cache_seqlens, q.shape[0])
            if not causal and tuple(window_size) in ((-1, -1), (None, None)):
                q_position = cache_seqlens[owner]
            q = rotate(q, q_position, rotary_cos, rotary_sin, rotary_interleaved)
        store(k, v, k_cache, v_cache, table, sequence, position, k_descale, v_descale)

    if cache_leftpad is not None:
        k_cache, v_cache, table = behind_leftpad(k_cache, v_cache, table, cache_leftpad)
        seqused_k = seqused_k - cache_leftpad
    result, lse = _attend(
        name,
        q,
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        block_table=table,
        out=out,
        window_size=window_size,
        s_aux=s_aux,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=capacity,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        softcap=softcap,
    )
    if not ragged:
        result, lse = _per_sequence(result, lse, *shape[:2])
    return _returned(name, result, lse, out, False, return_softmax_lse)


def _attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    out: Tensor | None,
    window_size: Window,
    s_aux: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    return_attn_probs: bool = False,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """The op behind all three: rows in, rows out."""
    rng_state = None
    if dropout_p > 0:
        if return_attn_probs:
            raise NotImplementedError(
                f"{name}: return_attn_probs is not offered with dropout_p > 0"
            )
        # seed and offset from the default generator of q's device: nothing is read on the host
        rng_state = torch.randint(2**62, (2,), dtype=torch.int64, device=q.device)
    left, right = (-1 if size is None else size for size in window_size)
    eight_bit = torch.bfloat16 if q.dtype.itemsize == 1 else None
    arguments |= {
        # engines keep sinks in the dtype of the model
        "sinks": None if s_aux is None else s_aux.float(),
        "rng_state": rng_state,
        "window_size_left": left,
        "window_size_right": right,
        "dropout_p": dropout_p,
        "out_dtype": eight_bit if out is None else out.dtype,
    }
    return flash_varlen(
        q,
        k,
        v,
        # a tensor would have to be read: the op derives its own bounds from shapes
        max_seqlen_q=None if isinstance(max_seqlen_q, Tensor) else max_seqlen_q,
        max_seqlen_k=None if isinstance(max_seqlen_k, Tensor) else max_seqlen_k,
        # each argument by name costs a call 0.2 microseconds
        **{name: value for name, value in arguments.items() if value is not DEFAULTS[name]},
    )


def _returned(
    name: str,
    result: Tensor,
    lse: Tensor,
    out: Tensor | None,
    return_attn_probs: bool,
    return_softmax_lse: bool,
) -> Result:
    if out is not None:
        if out.shape != result.shape:
            raise ValueError(
                f"{name}: out must have shape {tuple(result.shape)}, got {tuple(out.shape)}"
            )
        result = out.copy_(result)
    if return_attn_probs:
        return result, lse, None
    return (result, lse) if return_softmax_lse else result


def _per_sequence(result: Tensor, lse: Tensor, batch: int, seqlen: int) -> tuple[Tensor, Tensor]:
    """Rows laid end to end as (batch, seqlen, ...), and lse as (batch, num_heads, seqlen)."""
    lse = lse.reshape(lse.shape[0], batch, seqlen).transpose(0, 1).contiguous()
    return result.reshape(batch, seqlen, *result.shape[1:]), lse


def _refuse(name: str, **arguments: Any) -> None:
    for argument, value in arguments.items():
        if isinstance(value, Tensor) or value:
            raise NotImplementedError(f"{name}: {argument} is not offered")
