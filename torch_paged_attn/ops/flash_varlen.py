"""Contract of `paged_attn::flash_varlen`: exact attention over a batch of ragged sequences."""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.ops._again import UNKNOWN, again
from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.attention_checks import check_attention, check_attention_values


def check(*args: Any, **kwargs: Any) -> None:
    """Raise for metadata the contract forbids."""
    check_attention(AttentionCall.flash_varlen(*args, **kwargs))


def check_values(*args: Any, **kwargs: Any) -> None:
    """Raise for lengths and page ids that point outside. Reads tensors."""
    check_attention_values(AttentionCall.flash_varlen(*args, **kwargs))


def fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """What the op returns, in shape and dtype."""
    return AttentionCall.flash_varlen(*args, **kwargs).new_results()


# What every attention op takes, in the words of a schema; q, k and v (and a layout) come before.
TENSORS = (
    "Tensor cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k,"
    " Tensor? seqused_k=None, Tensor? block_table=None, Tensor? attn_bias=None,"
    " Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? q_descale=None,"
    " Tensor? k_descale=None, Tensor? v_descale=None, Tensor? out_scale=None,"
    " Tensor? rng_state=None"
)
SCALARS = (
    "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0.0,"
    " float dropout_p=0.0, ScalarType? out_dtype=None"
)

_flash_varlen = define(
    f"flash_varlen(Tensor q, Tensor k, Tensor v, {TENSORS}, *, float? softmax_scale=None,"
    f" bool causal=False, {SCALARS}) -> (Tensor out, Tensor softmax_lse)",
    check=check,
    check_values=check_values,
    fake=fake,
)


def default_max_seqlens(
    q: Tensor,
    k: Tensor,
    block_table: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[int, int]:
    """Scheduling hints from shapes alone: nothing is read from the device."""
    if max_seqlen_q is None:
        max_seqlen_q = q.shape[0]
    if max_seqlen_k is None:
        max_seqlen_k = k.shape[0] if block_table is None else block_table.shape[-1] * k.shape[2]
    return max_seqlen_q, max_seqlen_k


# of softmax_scale, the two windows, softcap, dropout_p and out_dtype
DEFAULT_SCALARS = None, -1, -1, 0.0, 0.0, None


def given_scalars(
    softmax_scale: float | None,
    causal: bool | None,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    dropout_p: float,
    out_dtype: torch.dtype | None,
) -> dict[str, Any]:
    """Those that are not the schema's defaults: each one would cost a call 0.2 microseconds."""
    given: dict[str, Any] = {}
    if causal is not None:
        given["causal"] = causal
    scalars = softmax_scale, window_size_left, window_size_right, softcap, dropout_p, out_dtype
    if scalars == DEFAULT_SCALARS:
        return given
    if softmax_scale is not None:
        given["softmax_scale"] = softmax_scale
    if window_size_left != -1:
        given["window_size_left"] = window_size_left
    if window_size_right != -1:
        given["window_size_right"] = window_size_right
    if softcap != 0:
        given["softcap"] = softcap
    if dropout_p != 0:
        given["dropout_p"] = dropout_p
    if out_dtype is not None:
        given["out_dtype"] = out_dtype
    return given


def flash_varlen(
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
) -> tuple[Tensor, Tensor]:
    """Attend each query of each sequence to the keys of its own sequence, packed or paged.

    Sequence `b` owns rows `cu_seqlens_q[b]:cu_seqlens_q[b + 1]` of `q` and has `Lk[b]` keys. Its
    query `i` stands at position `past + i`, `past = Lk - Lq`: the last query is aligned with the
    last key (bottom-right), in prefill, chunked prefill, decode and any mix of them. One logit, in
    float32:

        s = softmax_scale * (q . k)            stored values times their descale
        s = softcap * tanh(s / softcap)        if softcap > 0
        s = s - slope * abs(position - j)      if alibi_slopes
        s = s + attn_bias                      a bool bias masks where it is False
        masked unless j < Lk, j <= position (causal),
                      position - window_size_left <= j <= position + window_size_right

    then softmax over the visible keys and the sink, dropout on the probabilities, and `@ v`. A row
    that sees no key has `out = 0` and `softmax_lse = -inf` (with a sink: `softmax_lse = sink`), and
    so have the padding rows past `cu_seqlens_q[-1]`. What lies in memory that no query may see,
    NaN included, never reaches a result. On the CPU a sequence's result does not depend, bit for
    bit, on what else is in the batch. Nothing is read on the host on an accelerator.

    Args:
        q: `(total_q, num_heads, head_dim)` float32, bfloat16, float16, float8_e4m3fn or
            float8_e5m2.
        k, v: packed `(total_k, num_kv_heads, head_dim)` and `(..., head_dim_v)`; with `block_table`
            paged `(num_pages, num_kv_heads, page_size, head_dim)` and `(..., head_dim_v)`. Of q's
            dtype, or float8 or int8. Any strides whose last one is 1: a transposed cache, two
            halves of one storage, slices of a fused projection. `num_kv_heads` divides
            `num_heads`; query head `h` reads KV head `h // (num_heads // num_kv_heads)`.
        cu_seqlens_q: `(batch + 1,)` int32, nondecreasing, from 0 to at most `total_q`.
        cu_seqlens_k: `(batch + 1,)` int32. Packed: where each sequence's keys start; None means
            cu_seqlens_q. Paged: gives `Lk` by its differences when `seqused_k` is None.
        max_seqlen_q, max_seqlen_k: scheduling hints; no result depends on them. None: from shapes.
        seqused_k: `(batch,)` int32, `Lk`. Packed: cuts the lengths of `cu_seqlens_k` short.
        block_table: `(batch, max_pages)` int32; page `i` of a sequence holds its keys
            `i * page_size` to `(i + 1) * page_size - 1`. Entries past `ceil(Lk / page_size)` may
            hold anything.
        attn_bias: `(1 or num_heads, total_q, >= max Lk)` float32, bfloat16, float16 or bool, any
            strides: bias of query token `i` on the `j`-th key of its sequence (tree masks too).
        alibi_slopes: `(num_heads,)` or `(batch, num_heads)` float32.
        sinks: `(num_heads,)` float32, one extra logit in the denominator only.
        q_descale, k_descale, v_descale: `()`, `(num_kv_heads,)` or `(batch, num_kv_heads)` float32;
            stored value times descale is the real value.
        out_scale: `()` or `(1,)` float32 for a float8 output: stored = real / out_scale, rounded to
            nearest even and saturated.
        rng_state: `(2,)` int64 (seed, offset), required when `dropout_p > 0`. The mask is a pure
            function of (seed, offset, sequence, head, row, column): `reference/philox.py`.
        softmax_scale: factor of `q . k`; `head_dim ** -0.5` when omitted.
        causal: hide the keys that come after the query; clamps `window_size_right` to 0.
        window_size_left, window_size_right: keys seen before and after the position, inclusive; -1
            is unbounded.
        softcap: 0 is off. Before ALiBi and bias.
        dropout_p: in [0, 1); kept probabilities are divided by `1 - dropout_p`.
        out_dtype: dtype of `out`, that of `q` when omitted.

    Returns:
        `out` `(total_q, num_heads, head_dim_v)` and `softmax_lse` `(num_heads, total_q)` float32,
        the natural log of the sum of exponentials of the final logits, sink included.

    Raises:
        ValueError: a shape, dtype, device, stride or option outside the above, or (CPU) malformed
            lengths.
        IndexError: (CPU) a page id outside the cache.
        RuntimeError: (CPU) a block_table too narrow for a length.
        NotImplementedError: a result that would need a gradient.

    Sources: FlashAttention-2 (arXiv 2307.08691), PagedAttention (arXiv 2309.06180), ALiBi
    (arXiv 2108.12409), sinks as in gpt-oss (arXiv 2508.10925).
    """
    options = given_scalars(
        softmax_scale, causal or None, window_size_left, window_size_right, softcap, dropout_p,
        out_dtype,
    )  # fmt: skip
    rest = (
        seqused_k, block_table, attn_bias, alibi_slopes, sinks, q_descale, k_descale, v_descale,
        out_scale, rng_state,
    )  # fmt: skip
    first = q, k, v, cu_seqlens_q, cu_seqlens_k
    hints = default_max_seqlens(q, k, block_table, max_seqlen_q, max_seqlen_k)
    if not torch.compiler.is_dynamo_compiling() and hints[0] >= 0 <= hints[1]:
        results = again("flash_varlen", (*first, *rest), options)
        if results is not UNKNOWN:
            return results
    return _flash_varlen(*first, *hints, *rest, **options)
