"""The formula that `flash_varlen` and `blocksparse` share, one sequence at a time."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from torch_paged_attn.reference.philox import dropout_keep

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclasses.dataclass(frozen=True)
class Precision:
    """Where numbers are rounded: `compute` everywhere, then probabilities and result if asked.

    `magnitudes` sums |p v| in place of p v: what the rounding errors of a sum scale with.
    """

    compute: torch.dtype = torch.float32
    round_probabilities: bool = False
    round_out: bool = True
    magnitudes: bool = False


FLOAT32 = Precision()
GOLDEN = Precision(torch.float64, round_out=False)
BASELINE = Precision(torch.float32, round_probabilities=True)
MAGNITUDE = Precision(torch.float64, round_out=False, magnitudes=True)


def to_storage(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest even; the 8-bit formats saturate at their largest finite value."""
    if dtype in FLOAT8:
        x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    elif dtype == torch.int8:
        x = x.round().clamp(-128, 127)
    return x.to(dtype)


def _descale(scale: Tensor | None, b: int, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """One factor per KV head, whichever of the three shapes it came in."""
    if scale is None:
        return torch.ones(num_kv_heads, dtype=dtype)
    return (scale[b] if scale.dim() == 2 else scale).to(dtype).expand(num_kv_heads)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
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
    precision: Precision = FLOAT32,
    layout_mask: Callable[[int, Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`layout_mask(b, positions, keys)` is a further bool mask `(num_heads, Lq, Lk)`."""
    compute = precision.compute
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    group_size = num_heads // num_kv_heads
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(q.shape[0], num_heads, v.shape[-1], dtype=compute)
    lse = torch.full((num_heads, q.shape[0]), float("-inf"), dtype=compute)
    q_bounds = cu_seqlens_q.tolist()
    k_bounds = (cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k).tolist()

    for b in range(len(q_bounds) - 1):
        key_len = k_bounds[b + 1] - k_bounds[b] if seqused_k is None else int(seqused_k[b])
        rows = slice(q_bounds[b], q_bounds[b + 1])
        query_len = rows.stop - rows.start
        past = key_len - query_len
        positions = past + torch.arange(query_len)
        keys = torch.arange(key_len)

        # (num_heads, Lq, Lk): the masks that come from positions
        right = 0 if causal else window_size_right
        distance = keys[None, :] - positions[:, None]
        visible = torch.ones(query_len, key_len, dtype=torch.bool)
        if right >= 0:
            visible &= distance <= right
        if window_size_left >= 0:
            visible &= distance >= -window_size_left
        visible = visible.expand(num_heads, -1, -1)
        if layout_mask is not None:
            visible = visible & layout_mask(b, positions, keys)
        bias = None
        if attn_bias is not None:
            bias = attn_bias[:, rows, :key_len]
            visible = visible & (bias if bias.dtype == torch.bool else bias != float("-inf"))

        # only keys that some query sees are read: the rest may hold NaN, or be no page at all
        seen = visible.unflatten(0, (num_kv_heads, group_size)).any(2).any(1)  # (num_kv_heads, Lk)
        some = seen.any(0).nonzero()
        start, stop = (int(some[0]), int(some[-1]) + 1) if some.numel() else (0, 0)
        kv = []
        for cache, descale in ((k, k_descale), (v, v_descale)):
            real = torch.zeros(num_kv_heads, key_len, cache.shape[-1], dtype=compute)
            if block_table is None:
                stored = cache[k_bounds[b] + start : k_bounds[b] + stop].transpose(0, 1)
            else:
                page_size = cache.shape[2]
                pages = block_table[b].long()[keys[start:stop] // page_size]
                stored = cache[pages, :, keys[start:stop] % page_size].transpose(0, 1)
            real[:, start:stop] = stored.to(compute)
            real = real.masked_fill(~seen[..., None], 0.0)
            real *= _descale(descale, b, num_kv_heads, compute)[:, None, None]
            kv.append(real.repeat_interleave(group_size, 0))
        k_real, v_real = kv
        if precision.magnitudes:
            v_real = v_real.abs()
        q_scale = _descale(q_descale, b, num_kv_heads, compute).repeat_interleave(group_size)
        q_real = q[rows].transpose(0, 1).to(compute) * q_scale[:, None, None]

        s = (q_real @ k_real.mT) * scale
        if softcap > 0.0:
            s = softcap * torch.tanh(s / softcap)
        if alibi_slopes is not None:
            slopes = alibi_slopes[b] if alibi_slopes.dim() == 2 else alibi_slopes
            s = s - slopes.to(compute)[:, None, None] * distance.abs()
        if bias is not None and bias.dtype != torch.bool:
            s = s + bias.to(compute)
        s = s.masked_fill(~visible, float("-inf"))

        logits = s
        if sinks is not None:
            sink = sinks.to(compute)[:, None, None].expand(-1, query_len, 1)
            logits = torch.cat([s, sink], -1)
        if logits.shape[-1] == 0:
            continue  # neither a key nor a sink
        lse[:, rows] = logits.logsumexp(-1)
        shift = logits.amax(-1, keepdim=True)
        shift = shift.masked_fill(shift == float("-inf"), 0.0)
        p = (s - shift).exp()
        total = (logits - shift).exp().sum(-1, keepdim=True)
        total = total.masked_fill(total == 0.0, 1.0)  # a row without a key: 0 / 1
        if dropout_p > 0.0:
            assert rng_state is not None  # the contract's checks require it
            keep = dropout_keep(rng_state, dropout_p, b, num_heads, query_len, key_len)
            p = p.masked_fill(~keep, 0.0) / (1.0 - dropout_p)
        if precision.round_probabilities:
            p = p.to(q.dtype).to(compute)
        out[rows] = ((p @ v_real) / total).transpose(0, 1)

    if out_scale is not None:
        out = out / out_scale.to(compute)
    if precision.round_out:
        return to_storage(out, out_dtype or q.dtype), lse.float()
    if (out_dtype or q.dtype) in FLOAT8:
        limit = torch.finfo(out_dtype or q.dtype).max
        out = out.clamp(-limit, limit)
    return out, lse
