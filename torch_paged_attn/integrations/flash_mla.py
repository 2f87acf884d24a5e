"""FlashMLA's functions, by `selected_attention` and `flash_varlen`, on every device that has these.

    from torch_paged_attn.integrations.flash_mla import flash_mla_sparse_fwd

Any number of heads and any head_dim is allowed, and float32, float16 and bfloat16. As in FlashMLA,
a sink scales `out` but is no part of `softmax_lse`, which is +inf where a query sees no key; the
operators themselves count sinks in `softmax_lse` and have -inf there. The cache of 656 bytes a
token (`is_fp8_kvcache`) is read with `indices`, where the backend takes scales of latents.
"""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.integrations import _constants
from torch_paged_attn.integrations._arguments import check_tensors
from torch_paged_attn.ops import flash_varlen, merge_states, selected_attention
from torch_paged_attn.ops.checks import check_dim, check_shape, fail, refuse

__all__ = ["flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

# numbers of a latent, and bytes of a token in 8 bits
LATENT, BYTES = 512, 656

Parts = list[tuple[Tensor, Tensor]]


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[None, None]:
    """FlashMLA's schedule, which is not needed here: (None, None)."""
    return None, None


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    indexer_topk: int = 0,
) -> tuple[Tensor, None, Tensor]:
    """Attention of each query to the keys that it lists.

    Args:
        q: (s_q, h_q, d_qk)
        kv: (s_kv, h_kv, d_qk); its first d_v columns are the values
        indices: (s_q, h_kv, topk) int32, rows of kv; negative ones and those past s_kv name none
        sm_scale: factor of the logits
        attn_sink: (h_q,) float32, may be infinite. `out` is multiplied by
            exp(lse) / (exp(lse) + exp(attn_sink))
        topk_length: (s_q,) int32, how many indices of each query count

    Returns:
        out (s_q, h_q, d_v) of q's dtype; None in place of the largest logits; and lse (s_q, h_q)
        float32 without the sink, natural logarithms, +inf where a query sees no key. The first and
        the last have gradients.

    Raises:
        NotImplementedError: indexer_topk is given; or a gradient is needed with attn_sink and q of
            16 bits, whose partial result is float32.
    """
    name = "flash_mla_sparse_fwd"
    if indexer_topk:
        refuse(name, "indexer_topk is not supported", "call the function for the first indices")
    check_tensors(name, q=q, kv=kv, indices=indices)
    check_dim(name, "q", q, "(s_q, h_q, d_qk)")
    check_dim(name, "kv", kv, "(s_kv, h_kv, d_qk)")
    values = _values(name, "d_v", kv, d_v)
    counts = None
    if topk_length is not None:
        check_shape(name, "topk_length", topk_length, (q.shape[0],), "(s_q,)")
        counts = topk_length[:, None].expand(-1, indices.shape[1]).contiguous()
    part = selected_attention(
        q,
        kv,
        values,
        indices,
        _constants.multiples(q.shape[0], 1, q),
        _constants.multiples(kv.shape[0], 1, q),
        num_selected=counts,
        softmax_scale=sm_scale,
        causal=False,
        out_dtype=_partial(q, attn_sink),
    )
    out, lse = _finished(name, q, [part], attn_sink)
    return out, None, lse.T


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to a paged cache, to all keys of each sequence or to those that `indices` lists.

    Args:
        q: (batch, s_q, h_q, d_qk)
        k_cache: (num_pages, page_size, h_kv, d_qk); its first head_dim_v columns are the values.
            With is_fp8_kvcache 656 bytes a token of any 8-bit dtype: 512 of e4m3, four float32
            scales, each of 128 of these, and 64 rope keys of q's dtype
        block_table, cache_seqlens: (batch, max_pages) and (batch,) int32, without indices
        tile_scheduler_metadata, num_splits: schedules, which change no result: not used
        softmax_scale: None: 1 / sqrt(d_qk)
        causal: False with indices
        indices: (batch, s_q, topk) int32, slots `page * page_size + offset`; negative ones
            name none
        attn_sink: (h_q,) float32, as in `flash_mla_sparse_fwd`
        extra_k_cache, extra_indices_in_kvcache: a second cache of the same form, and its indices
        topk_length, extra_topk_length: (batch,) int32, how many indices of each query count

    Returns:
        out (batch, s_q, h_q, head_dim_v) of q's dtype, and lse (batch, h_q, s_q) float32 without
        the sink, +inf where a query sees no key.

    Raises:
        NotImplementedError: is_fp8_kvcache without indices, or on a backend that does not take the
            scales.
        ValueError: an argument of one kind of call with the other, or missing.
    """
    name = "flash_mla_with_kvcache"
    if is_fp8_kvcache and indices is None:
        instead = "use a cache of 16 bits, or give indices"
        refuse(name, "is_fp8_kvcache=True without indices is not supported", instead)
    check_tensors(name, q=q, k_cache=k_cache)
    check_dim(name, "q", q, "(batch, s_q, h_q, d_qk)")
    batch, s_q = q.shape[:2]
    rows, bounds = q.flatten(0, 1), _constants.multiples(s_q, batch, q)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    options: dict[str, Any] = {"softmax_scale": scale, "causal": causal}
    options["out_dtype"] = _partial(q, attn_sink, extra_k_cache)
    if indices is None:
        sparse = {
            "attn_sink": attn_sink,
            "extra_k_cache": extra_k_cache,
            "extra_indices_in_kvcache": extra_indices_in_kvcache,
            "topk_length": topk_length,
            "extra_topk_length": extra_topk_length,
        }
        for argument, given in sparse.items():
            if given is not None:
                fail(name, argument, "a tensor", "None without indices")
        check_tensors(name, block_table=block_table, cache_seqlens=cache_seqlens)
        k, v = _pages(name, "k_cache", k_cache, head_dim_v)
        tables: dict[str, Any] = {"seqused_k": cache_seqlens, "block_table": block_table}
        parts = [flash_varlen(rows, k, v, bounds, **tables, **options)]
    else:
        if causal:
            fail(name, "causal", "True", "False with indices, which name slots and no positions")
        if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
            missing = "extra_k_cache" if extra_k_cache is None else "extra_indices_in_kvcache"
            fail(name, missing, "None", "a tensor beside the other of the two")
        if extra_topk_length is not None and extra_k_cache is None:
            fail(name, "extra_topk_length", "a tensor", "None without extra_k_cache")
        caches = [("", k_cache, indices, topk_length)]
        if extra_k_cache is not None and extra_indices_in_kvcache is not None:
            caches.append(("extra_", extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
        parts = []
        for extra, cache, slots, lengths in caches:
            read: dict[str, Any] = {"q": rows}
            if is_fp8_kvcache:
                read = _latents(name, f"{extra}k_cache", rows, cache, head_dim_v)
            else:
                pages = _pages(name, f"{extra}k_cache", cache, head_dim_v)
                read["k"], read["v"] = pages
            listing = f"{extra}indices_in_kvcache" if extra else "indices"
            check_dim(name, listing, slots, "(batch, s_q, topk)")
            shape = batch, s_q, slots.shape[2]
            check_shape(name, listing, slots, shape, "(batch, s_q, topk)")
            counts = None
            if lengths is not None:
                check_shape(name, f"{extra}topk_length", lengths, (batch,), "(batch,)")
                counts = lengths.repeat_interleave(s_q)[:, None]
            slots = slots.flatten(0, 1)[:, None]
            listed: dict[str, Any] = {
                "key_indices": slots,
                "cu_seqlens_q": bounds,
                "num_selected": counts,
            }
            parts.append(selected_attention(**read, **listed, **options))
    out, lse = _finished(name, rows, parts, attn_sink)
    return out.unflatten(0, (batch, s_q)), lse.unflatten(1, (batch, s_q)).transpose(0, 1)


def _values(name: str, argument: str, kv: Tensor, head_dim_v: int) -> Tensor:
    """The columns of keys that are values, as many as an argument says."""
    if not 1 <= head_dim_v <= kv.shape[-1]:
        fail(name, argument, f"{head_dim_v}", f"1 to d_qk = {kv.shape[-1]}")
    return kv[..., :head_dim_v]


def _pages(name: str, argument: str, cache: Tensor, head_dim_v: int) -> tuple[Tensor, Tensor]:
    """Keys and values as pages (num_pages, h_kv, page_size, head_dim)."""
    check_dim(name, argument, cache, "(num_pages, page_size, h_kv, d_qk)")
    pages = cache.transpose(1, 2)
    return pages, _values(name, "head_dim_v", pages, head_dim_v)


def _latents(
    name: str, argument: str, q: Tensor, cache: Tensor, head_dim_v: int
) -> dict[str, Tensor]:
    """Arguments of `selected_attention` for queries (rows, h_q, 576) and a cache of 656 bytes a
    token."""
    check_dim(name, argument, cache, "(num_pages, page_size, h_kv, 656)")
    rope = q.shape[-1] - LATENT
    if cache.element_size() != 1 or cache.shape[-1] != BYTES or rope * q.element_size() != 128:
        given = f"{cache.dtype} {tuple(cache.shape)} for q of {q.dtype} {tuple(q.shape)}"
        allowed = f"{BYTES} bytes a token for 16-bit queries of 576, with is_fp8_kvcache"
        fail(name, argument, given, allowed)
    if head_dim_v != LATENT:
        fail(name, "head_dim_v", f"{head_dim_v}", f"{LATENT} with is_fp8_kvcache")
    latents, scales, ropes = cache.view(torch.uint8).transpose(1, 2).split([LATENT, 16, 128], -1)
    return {
        "q": q[..., LATENT:],
        "q_latent": q[..., :LATENT],
        "k": ropes.view(q.dtype),
        "v": latents.view(torch.float8_e4m3fn),
        "v_descale": scales.view(torch.float32),
    }


def _partial(q: Tensor, *later: Tensor | None) -> torch.dtype | None:
    """The dtype of partial results; float32 if they are merged or scaled, and rounded then."""
    is_last = all(x is None for x in later)
    return None if is_last or q.dtype == torch.float32 else torch.float32


def _finished(
    name: str, q: Tensor, parts: Parts, attn_sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Merged, with the sink, of q's dtype: out (rows, h_q, d_v) and lse (h_q, rows)."""
    out, lse = parts[0] if len(parts) == 1 else merge_states(*parts[0], *parts[1])
    sees_keys = lse > float("-inf")
    if attn_sink is not None:
        check_shape(name, "attn_sink", attn_sink, (q.shape[1],), "(h_q,)")
        # exp(lse) / (exp(lse) + exp(sink)); out is 0 where no key is seen
        share = (lse.where(sees_keys, 0.0) - attn_sink.float()[:, None]).sigmoid()
        out = out * share.T[..., None]
    return out.to(q.dtype), lse.where(sees_keys, float("inf"))
