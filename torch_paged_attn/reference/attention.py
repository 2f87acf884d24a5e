"""The formula that `flash_varlen` and `blocksparse` share, one sequence at a time."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import (
    AttentionCall,
    is_by_column,
    is_by_token,
    key_lengths,
)
from torch_paged_attn.reference.philox import dropout_keep

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclasses.dataclass
class Sums:
    """The terms of one sequence's results, from which `testing/scales.py` derives how large a
    kernel's rounding errors may be.

    rows: the sequence's rows of q
    softmax: `(heads, Lq, Lk)`, probabilities before dropout
    weights: `(heads, Lq, Lk)`, probabilities after dropout; the result is `weights @ values`
    values: `(heads, Lk, dim_v)`, or `(heads, Lq, Lk, dim_v)` if they differ by row
    logits: `(heads, Lq, Lk)`, the sum of the magnitudes of what a logit adds up: |q k|, ALiBi, bias
    dtype: to which a kernel may round the probabilities
    """

    rows: slice
    softmax: Tensor
    weights: Tensor
    values: Tensor
    logits: Tensor
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Precision:
    """In which precision the reference computes.

    compute: dtype of all intermediate numbers
    round_probabilities: whether probabilities are rounded to q's dtype, as kernels do
    round_out: whether results are rounded to the dtypes that the operator returns
    observe: called once per sequence with its `Sums` (of a backward: `BackwardSums`)
    """

    compute: torch.dtype = torch.float32
    round_probabilities: bool = False
    round_out: bool = True
    observe: Callable[[Any], None] | None = None


FLOAT32 = Precision()
GOLDEN = Precision(torch.float64, round_out=False)
BASELINE = Precision(torch.float32, round_probabilities=True)


def to_storage(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to `dtype`, rounded to nearest even. 8-bit dtypes saturate; uint8 is int4, two
    numbers a byte along the last dimension, the even one in the low bits.
    """
    if dtype in FLOAT8:
        x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    elif dtype == torch.int8:
        x = x.round().clamp(-128, 127)
    elif dtype == torch.uint8:
        bits = x.round().clamp(-7, 7).to(torch.int8).view(torch.uint8) & 15
        return bits[..., ::2] | bits[..., 1::2] << 4
    return x.to(dtype)


def from_storage(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that a cache holds, without their scale, in `dtype`."""
    if stored.dtype != torch.uint8:
        return stored.to(dtype)
    bits = torch.stack([stored & 15, stored >> 4], -1).flatten(-2).to(torch.int8)
    return ((bits ^ 8) - 8).to(dtype)


def _descale(call: AttentionCall, scale: Tensor | None, b: int, dtype: torch.dtype) -> Tensor:
    """The factors of sequence b, `(num_kv_heads,)`, from a descale that no token has its own of."""
    if scale is None:
        return torch.ones(call.num_kv_heads, dtype=dtype, device=call.q.device)
    return (scale[b] if scale.dim() == 2 else scale).to(dtype).expand(call.num_kv_heads)


def attend(
    call: AttentionCall,
    precision: Precision = FLOAT32,
    layout_mask: Callable[[int, Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`out` and `softmax_lse` of a call.

    layout_mask: called with a sequence b, its queries' positions (Lq,) and its keys' positions
        (Lk,); returns a further bool mask `(num_heads, Lq, Lk)`
    """
    compute = precision.compute
    num_heads, device = call.num_heads, call.q.device
    out = torch.zeros(call.total_q, num_heads, call.head_dim_v, dtype=compute, device=device)
    lse = torch.full((num_heads, call.total_q), float("-inf"), dtype=compute, device=device)

    for x in scored_sequences(call, compute, layout_mask):
        s, rows = x.logits, x.rows
        logits = s
        if call.sinks is not None:
            sink = call.sinks.to(compute)[:, None, None].expand(-1, s.shape[1], 1)
            logits = torch.cat([s, sink], -1)
        if logits.shape[-1] == 0:
            continue  # neither a key nor a sink
        lse[:, rows] = logits.logsumexp(-1)
        shift = logits.amax(-1, keepdim=True)
        shift = shift.masked_fill(shift == float("-inf"), 0.0)
        p = (s - shift).exp()
        total = (logits - shift).exp().sum(-1, keepdim=True)
        total = total.masked_fill(total == 0.0, 1.0)  # a row without a key: 0 / 1
        undropped = p
        p = x.dropped(p)
        if precision.round_probabilities:
            p = p.to(call.q.dtype).to(compute)
        out[rows] = (p @ x.v / total).transpose(0, 1)
        if precision.observe is not None:
            values = x.v if call.out_scale is None else x.v / call.out_scale.to(compute)
            weights = undropped / total, p / total
            precision.observe(Sums(rows, *weights, values, x.magnitudes(), call.q.dtype))

    if call.out_scale is not None:
        out = out / call.out_scale.to(compute)
    if precision.round_out:
        return to_storage(out, call.result_dtype), lse.float()
    if call.result_dtype in FLOAT8:
        limit = torch.finfo(call.result_dtype).max
        out = out.clamp(-limit, limit)
    return out, lse


@dataclasses.dataclass
class Scored:
    """One sequence with its logits. Every tensor has one entry per query head.

    `q` is `(heads, Lq, dim)`, `k` and `v` are `(heads, Lk, dim)`, all descaled. `visible` (the
    mask), `scores` (logits before ALiBi and bias), `logits` and `keep` are `(heads, Lq, Lk)`.
    """

    call: AttentionCall
    rows: slice
    first_key: int  # of packed keys: the row of the call's k and v where the sequence starts
    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor
    scores: Tensor
    terms: list[Tensor]  # ALiBi and bias
    logits: Tensor
    keep: Tensor | None  # what dropout keeps
    latent: Tensor | None  # q_latent, (heads, Lq, dim_v), descaled

    def dropped(self, p: Tensor) -> Tensor:
        """`p` `(heads, Lq, Lk)` after dropout: 0, or divided by `1 - dropout_p`."""
        if self.keep is None:
            return p
        return p.masked_fill(~self.keep, 0.0) / (1.0 - self.call.dropout_p)

    def magnitudes(self) -> Tensor:
        """For each logit, the magnitude with which rounding errors of its computation scale.

        A sum of n products is rounded at each of its n partial sums. If all products have one sign,
        as for the key with a row's largest logit, the partial sums are larger than the products: on
        average over all orders, the sum of their squares is n / 3 times the square of the whole sum
        plus n / 6 times the sum of the squared products.
        """
        pairs = [(self.q, self.k)]
        if self.latent is not None:
            pairs.append((self.latent, self.v))
        none = self.q.new_zeros(())
        sizes = sum((x.abs() @ y.abs().mT for x, y in pairs), none)
        whole = sum((x @ y.mT for x, y in pairs), none)
        squares = sum((x.square() @ y.square().mT for x, y in pairs), none)
        count = sum(x.shape[-1] for x, _ in pairs)
        partial = (count * (whole.square() / 3.0 + squares / 6.0)).sqrt()
        products = sizes.maximum(partial) * abs(self.call.scale)
        terms = (term.abs() for term in self.terms)
        return sum(terms, products).masked_fill(~self.visible, 0.0)


def scored_sequences(
    call: AttentionCall,
    compute: torch.dtype,
    layout_mask: Callable[[int, Tensor, Tensor], Tensor] | None,
) -> Iterator[Scored]:
    """The sequences of a call, in order, with their logits in dtype `compute`."""
    num_heads, device = call.num_heads, call.q.device
    q_bounds = call.cu_seqlens_q.tolist()
    key_lens = key_lengths(call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k).tolist()
    first_positions, first_keys = call.first_positions().tolist(), call.first_keys().tolist()
    for b, key_len in enumerate(key_lens):
        rows = slice(q_bounds[b], q_bounds[b + 1])
        query_len = rows.stop - rows.start
        positions = first_positions[b] + torch.arange(query_len, device=device)
        keys = call.key_positions(torch.arange(key_len, device=device))
        distance = keys[None, :] - positions[:, None]
        visible = _visible(call, distance).expand(num_heads, -1, -1)
        if call.tail_mask is not None:
            visible = visible & _seen_of_tail(call.tail_mask[rows, :query_len], key_len)
        if layout_mask is not None:
            visible = visible & layout_mask(b, positions, keys)
        bias = None
        if call.attn_bias is not None:
            bias = call.attn_bias[:, rows, :key_len]
            visible = visible & (bias if bias.dtype == torch.bool else bias != float("-inf"))
        k = _real_rows(call, b, call.k, call.k_descale, visible, compute)
        v = _real_rows(call, b, call.v, call.v_descale, visible, compute)
        q_scale = _descale(call, call.q_descale, b, compute)
        q_scale = q_scale.repeat_interleave(call.group_size)[:, None, None]
        q = call.q[rows].transpose(0, 1).to(compute) * q_scale

        products, latent = q @ k.mT, None
        if call.q_latent is not None:
            latent = call.q_latent[rows].transpose(0, 1).to(compute) * q_scale
            products = products + latent @ v.mT
        scores = products * call.scale
        if call.softcap > 0.0:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        terms = []
        if call.alibi_slopes is not None:
            slopes = call.alibi_slopes[b] if call.alibi_slopes.dim() == 2 else call.alibi_slopes
            terms.append(-slopes.to(compute)[:, None, None] * distance.abs())
        if bias is not None and bias.dtype != torch.bool:
            terms.append(bias.to(compute))
        logits = sum(terms, scores).masked_fill(~visible, float("-inf"))
        keep = None
        if call.dropout_p > 0.0:
            assert call.rng_state is not None  # the contract's checks require it
            keep = dropout_keep(call.rng_state, call.dropout_p, b, num_heads, query_len, key_len)
        first = first_keys[b]
        yield Scored(call, rows, first, q, k, v, visible, scores, terms, logits, keep, latent)


def _visible(call: AttentionCall, distance: Tensor) -> Tensor:
    """Bool `(Lq, Lk)`: the causal and window masks. `distance` `(Lq, Lk)` is the key's position
    minus the query's.
    """
    visible = torch.ones_like(distance, dtype=torch.bool)
    if call.window_right >= 0:
        visible &= distance <= call.window_right
    if call.window_size_left >= 0:
        visible &= distance >= -call.window_size_left
    return visible


def _seen_of_tail(mask: Tensor, key_len: int) -> Tensor:
    """Bool `(Lq, Lk)`: `tail_mask` `(Lq, Lq)` for the newest Lq keys, True for all older ones."""
    query_len = mask.shape[0]
    past = key_len - query_len
    older = torch.ones(query_len, max(past, 0), dtype=torch.bool, device=mask.device)
    return torch.cat([older, mask[:, max(-past, 0) :]], 1)


def _real_rows(
    call: AttentionCall,
    b: int,
    stored: Tensor,
    descale: Tensor | None,
    visible: Tensor,
    compute: torch.dtype,
) -> Tensor:
    """The descaled keys or values of sequence b for each query head, `(num_heads, Lk, dim)`.

    Only rows that a query sees are read, others are 0: they may hold NaN, and their block_table
    entries may be invalid.
    """
    heads = call.num_kv_heads
    seen = visible.unflatten(0, (heads, call.group_size)).any(2).any(1)  # (num_kv_heads, Lk)
    some = seen.any(0).nonzero()
    start, stop = (int(some[0]), int(some[-1]) + 1) if some.numel() else (0, 0)
    keys = torch.arange(start, stop, device=seen.device)

    def rows_of(memory: Tensor) -> Tensor:
        if call.block_table is None:
            return memory[keys + int(call.first_keys()[b])]
        pages = call.block_table[b].long()[keys // call.page_size]
        return memory[pages, :, keys % call.page_size]

    rows = from_storage(rows_of(stored), compute).transpose(0, 1)
    if descale is not None and is_by_token(descale, call.batch):
        scales = rows_of(descale).to(compute).transpose(0, 1)
        if is_by_column(descale, stored):  # (num_kv_heads, keys, groups of columns)
            scales = scales.repeat_interleave(rows.shape[-1] // scales.shape[-1], -1)
        else:
            scales = scales[..., None]
    else:
        scales = _descale(call, descale, b, compute)[:, None, None]
    real = rows.new_zeros(heads, seen.shape[1], rows.shape[-1])
    real[:, start:stop] = rows * scales
    real = real.masked_fill(~seen[..., None], 0.0)
    return real.repeat_interleave(call.group_size, 0)
