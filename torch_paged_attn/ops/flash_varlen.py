"""Contract of `paged_attn::flash_varlen`: exact attention over a batch of ragged sequences."""

from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, fill_hints, tensor_names
from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.accepted import operator_of
from torch_paged_attn.ops.attention_checks import check_attention, check_attention_values
from torch_paged_attn.ops.attention_gradients import AttentionDerivative
from torch_paged_attn.ops.kinds import call_operator
from torch_paged_attn.ops.paths import public
from torch_paged_attn.ops.signature import described, schema


def check(*args: Any, **kwargs: Any) -> None:
    """Raise for metadata that the contract forbids."""
    check_attention(AttentionCall.flash_varlen(*args, **kwargs))


def check_values(*args: Any, **kwargs: Any) -> None:
    """Raise for lengths and page ids out of range. Reads tensors on the host."""
    check_attention_values(AttentionCall.flash_varlen(*args, **kwargs))


def fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Empty results of the op's shapes and dtypes."""
    return AttentionCall.flash_varlen(*args, **kwargs).new_results()


_flash_varlen = operator_of(
    define(
        schema("flash_varlen"),
        check=check,
        check_values=check_values,
        fake=fake,
        call=AttentionCall.flash_varlen,
        has_plan=True,
        derivative=AttentionDerivative("flash_varlen"),
        autocast=True,
    )
)

_TENSORS = tensor_names("flash_varlen")
# the tensors that the public functions pass on as `*tensors`
BEHIND_BLOCK_TABLE = _TENSORS[_TENSORS.index("block_table") + 1 :]


def refuse_twice(op: str, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> None:
    """Raise TypeError for a tensor that is given by position and by name: torch's own error does
    not say which argument it is.
    """
    for name in BEHIND_BLOCK_TABLE[: len(tensors)]:
        if name in options:
            raise TypeError(f"{op}() got multiple values for argument '{name}'")


@public
@described
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
    *tensors: Tensor | None,
    **options: Any,
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
    so have the padding rows past `cu_seqlens_q[-1]`. Memory that no query may see, such as unused
    cache slots, may hold anything, NaN included: it never reaches a result. On the CPU the bits of
    a sequence's result do not depend on the other sequences of the batch. On an accelerator the
    host reads no tensor value and does not wait.

    Args:
        {arguments}

    Returns:
        `out` `(total_q, num_heads, head_dim_v)` and `softmax_lse` `(num_heads, total_q)` float32,
        the natural log of the sum of exponentials of the final logits, sink included.

    Raises:
        TypeError: an argument of the wrong type, such as a list for a tensor.
        ValueError: a shape, dtype, device, stride or option outside the above, or (CPU) malformed
            lengths.
        IndexError: (CPU) a page id outside the cache.
        RuntimeError: (CPU) a block_table too narrow for a length.
        NotImplementedError: an input requires grad and the gradient does not exist: with paged
            keys, 8-bit tensors, an out_dtype other than q's, for slopes or scales, or on this
            device. Or the device's backend does not support an argument, which it names.

    Sources: FlashAttention-2 (arXiv 2307.08691), PagedAttention (arXiv 2309.06180), ALiBi
    (arXiv 2108.12409), sinks as in gpt-oss (arXiv 2508.10925).
    """
    if tensors and options:
        refuse_twice("flash_varlen", tensors, options)
    if max_seqlen_q is None or max_seqlen_k is None:
        hints = fill_hints(q, k, block_table, max_seqlen_q, max_seqlen_k)
        max_seqlen_q, max_seqlen_k = hints
    first = q, k, v, cu_seqlens_q, cu_seqlens_k
    args = *first, max_seqlen_q, max_seqlen_k, seqused_k, block_table, *tensors
    return call_operator(_flash_varlen, args, options)
