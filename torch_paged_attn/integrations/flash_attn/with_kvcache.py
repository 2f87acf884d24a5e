"""`flash_attn_with_kvcache`: append to a KV cache, then `flash_varlen`."""

from typing import Any

from torch import Tensor

from torch_paged_attn.integrations import _constants
from torch_paged_attn.integrations import _kvcache_checks as checks
from torch_paged_attn.integrations._arguments import (
    Window,
    both_sides,
    check_tensors,
    flash_varlen_arguments,
    one_of,
    refuse,
)
from torch_paged_attn.integrations._kvcache import (
    APPENDING,
    ATTENDING,
    attend_only,
    behind_leftpad,
    in_one_call,
    lengths_of,
    new_tokens,
    pages_of,
    rotate,
)
from torch_paged_attn.integrations._storages import check_storages, readable, with_whole_rows
from torch_paged_attn.integrations.flash_attn._results import (
    Result,
    check_out,
    lse_per_sequence,
    returned,
)
from torch_paged_attn.ops import flash_varlen, reshape_and_cache
from torch_paged_attn.ops._autocast import cast_early
from torch_paged_attn.ops.accepted import as_int32
from torch_paged_attn.ops.append_and_attend import check_rotary
from torch_paged_attn.ops.append_slots import append_slots, positions


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
    """Attention over a KV cache, to which new keys and values, if given, are first appended in
    place.

    q: (batch, seqlen_q, num_heads, head_dim), or with cu_seqlens_q (batch + 1,) int32 ragged,
        (total_q, num_heads, head_dim)
    k_cache, v_cache: (cache_batch, seqlen_cache, num_kv_heads, head_dim), or with block_table (or
        page_table) pages (num_pages, page_size, num_kv_heads, head_dim). They are never copied, so
        the last dimension has to be contiguous
    k, v: new keys and values (batch, seqlen_new, num_kv_heads, head_dim), or with cu_seqlens_k_new
        packed. They are stored after the cache_seqlens tokens of each sequence, in 8-bit caches
        divided by the descales
    qv: q's latents of MLA, shaped like q with v's head_dim: adds qv . v to q . k
    cache_seqlens: (batch,) int32 or an int, tokens in the cache BEFORE the new ones. None without k
        and v: the cache is full. With k and v, a negative length marks a row of padding: none of
        its tokens is stored, and its result is 0
    cache_batch_idx: (batch,) int32, the cache row of each sequence; not with a block table
    cache_leftpad: (batch,) int32, number of slots before each sequence's first key, which
        cache_seqlens includes; only if (cache_batch, seqlen_cache) can be viewed as one dimension
    rotary_cos, rotary_sin: (>= cache length, rotary_dim / 2), only with k and v. k is rotated to
        its positions in the cache, and q to the same positions. Without causal mask and window,
        all of q is rotated to the position of the first new key

    On a CPU, and elsewhere under PAGED_ATTN_CHECK=1, all arguments and their values are checked
    before anything is written to the cache. In a compiled graph each op does its own checks.

    Returns out of q's shape, but v's head_dim; with return_softmax_lse also softmax_lse
    (batch, num_heads, seqlen_q), ragged (num_heads, total_q).
    """
    name = checks.OP
    if rotary_seqlens is not None or attention_chunk:
        refuse(name, rotary_seqlens=rotary_seqlens, attention_chunk=attention_chunk)
    table = block_table
    if page_table is not None:
        table = one_of(name, block_table=block_table, page_table=page_table)
    if cache_batch_idx is cache_leftpad is qv is out is None:
        # most calls have no window, and are compared with one that has none
        left = right = -1
        if window_size != (-1, -1):
            left, right = both_sides(name, window_size)
        options: dict[str, Any] = {"causal": bool(causal)}
        if softmax_scale is not None:
            options["softmax_scale"] = softmax_scale
        if softcap:
            options["softcap"] = softcap
        if left >= 0 or right >= 0:
            options |= {"window_size_left": left, "window_size_right": right}
        found, hint = None, {}
        if cu_seqlens_q is not None and type(max_seqlen_q) is int:
            hint = {"max_seqlen_q": max_seqlen_q}
        if k is v is rotary_cos is rotary_sin is cu_seqlens_k_new is None:
            args: tuple[Any, ...] = (
                q, k_cache, v_cache, cache_seqlens, table, cu_seqlens_q, alibi_slopes, s_aux,
                q_descale, k_descale, v_descale,
            )  # fmt: skip
            found = in_one_call(ATTENDING, args, options | hint if hint else options)
            if found is None:
                found = attend_only(
                    *(q, k_cache, v_cache, cache_seqlens, table, cu_seqlens_q, max_seqlen_q),
                    alibi_slopes=alibi_slopes,
                    sinks=s_aux,
                    q_descale=q_descale,
                    k_descale=k_descale,
                    v_descale=v_descale,
                    **options,
                )
        elif alibi_slopes is q_descale is None:
            if cu_seqlens_k_new is not None and cu_seqlens_k_new is cu_seqlens_q:
                # a plan's guard takes no tensor twice
                cu_seqlens_k_new = cu_seqlens_k_new.detach()
            if rotary_cos is not None:
                options["rotary_interleaved"] = bool(rotary_interleaved)
            args = (
                q, k_cache, v_cache, k, v, cache_seqlens, table, s_aux, k_descale, v_descale,
                cu_seqlens_q, cu_seqlens_k_new, rotary_cos, rotary_sin,
            )  # fmt: skip
            found = in_one_call(APPENDING, args, options | hint if hint else options)
        if found is not None:
            result, lse = found
            if not return_softmax_lse:
                return result
            if cu_seqlens_q is None:
                lse = lse_per_sequence(lse, q.shape[0], q.shape[1])
            return result, lse
    if (k is None) != (v is None):
        raise ValueError(f"{name}: k and v must come together, got one of them")
    if (rotary_cos is None) != (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise ValueError(f"{name}: rotary_cos and rotary_sin must come together, and with k and v")
    check_tensors(name, q=q)
    if q.dim() != (4 if cu_seqlens_q is None else 3):
        raise ValueError(
            f"{name}: q must be (batch, seqlen_q, num_heads, head_dim), or (total_q, num_heads, "
            f"head_dim) with cu_seqlens_q, got shape {tuple(q.shape)}"
        )
    q, _, _ = cast_early(q, k_cache, v_cache)
    checks.check_caches(q, k_cache, v_cache)
    q, shape = with_whole_rows(name, "q", q), q.shape
    check_out(name, out, q, v_cache)
    if qv is not None:
        check_tensors(name, qv=qv)
        qv = with_whole_rows(name, "qv", cast_early(qv, k_cache, v_cache)[0])
        if qv.dim() == 4 == q.dim():
            qv = qv.flatten(0, 1)

    seqlen_q = None
    if cu_seqlens_q is None:
        seqlen_q = max_seqlen_q = shape[1]
        cu_seqlens_q = _constants.multiples(seqlen_q, shape[0], q)
        q = q.flatten(0, 1)
    else:
        cu_seqlens_q = as_int32(name, "cu_seqlens_q", cu_seqlens_q)
        checks.check_cu_seqlens_q(cu_seqlens_q)
    batch, may_read = cu_seqlens_q.shape[0] - 1, readable(q)
    if may_read:
        check_storages(
            name,
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            k=k,
            v=v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            block_table=table,
            alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k_new=cu_seqlens_k_new,
            s_aux=s_aux,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
        )
    has_table = table is not None
    table = pages_of(k_cache, table, cache_batch_idx, batch, may_read)
    capacity = table.shape[1] * k_cache.shape[1]
    if cache_seqlens is None:
        if k is not None:
            raise ValueError(f"{name}: cache_seqlens must be given with k and v")
        cache_seqlens = capacity
    seqused_k = cache_seqlens = lengths_of(cache_seqlens, batch, q)
    if k is None and may_read:
        checks.check_room(cache_seqlens, None, capacity, has_table)
    if cache_leftpad is not None:
        cache_leftpad = as_int32(name, "cache_leftpad", cache_leftpad)
        checks.check_per_sequence("cache_leftpad", cache_leftpad, batch, "(batch,)")
        if may_read:
            checks.check_leftpad(cache_leftpad, cache_seqlens)

    pages = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    to_store: tuple[Any, ...] | None = None
    if k is not None and v is not None:
        new = new_tokens(k, v, cu_seqlens_k_new, batch, may_read)
        if may_read:
            checks.check_room(cache_seqlens, new.lengths(), capacity, has_table)
        num_tokens, page_size = new.k.shape[0], k_cache.shape[1]
        slot_mapping, seqused_k = append_slots(
            cache_seqlens, table, new.cu_seqlens, page_size, num_tokens
        )
        if rotary_cos is not None and rotary_sin is not None:
            rotary = rotary_cos, rotary_sin, rotary_interleaved
            head_dim = min(shape[-1], new.k.shape[-1])
            check_rotary(name, rotary_cos, rotary_sin, capacity, head_dim)
            starts = seqused_k - new.lengths()
            position, _ = positions(starts, new.cu_seqlens, num_tokens)
            new = new._replace(k=rotate(new.k, position, *rotary))
            ragged = None if seqlen_q is not None else cu_seqlens_q
            q_position, owner = positions(starts, ragged, q.shape[0])
            if not causal and both_sides(name, window_size) == (-1, -1):
                first = starts[:, None] if owner is None else starts[owner]
                q_position = first.expand_as(q_position)
            q = rotate(q, q_position, *rotary)
        scales: tuple[Tensor | None, ...] = ()
        if k_cache.dtype.itemsize == 1:
            scales = k_descale, v_descale
            checks.check_descale("k_descale", k_descale)
            checks.check_descale("v_descale", v_descale)
        if batch and capacity and num_tokens:
            to_store = new.k, new.v, pages, slot_mapping, *scales

    if cache_leftpad is not None:
        k_cache, v_cache, table = behind_leftpad(k_cache, v_cache, table, cache_leftpad)
        pages = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        seqused_k = seqused_k - cache_leftpad
        if k is not None:
            seqused_k = seqused_k.clamp(min=0)  # a row of padding has no keys
    arguments = flash_varlen_arguments(
        name,
        q,
        *pages,
        qv=qv,
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
    checks.check_gradients(arguments)
    if to_store is not None:
        if may_read:
            checks.check_attention(arguments)
        reshape_and_cache(*to_store)
    result, lse = flash_varlen(**arguments)
    if seqlen_q is not None:
        result = result.reshape(*shape[:3], v_cache.shape[3])
        lse = lse_per_sequence(lse, shape[0], seqlen_q) if return_softmax_lse else lse
    return returned(result, lse, out, False, return_softmax_lse)
