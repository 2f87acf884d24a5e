"""Contract of `paged_attn::flash_varlen_backward`: the gradients of `flash_varlen`'s inputs."""

from typing import Any

from torch import Tensor

from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops._gradients import Once
from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.attention_checks import check_attention_values
from torch_paged_attn.ops.attention_gradients import check_backward
from torch_paged_attn.ops.flash_varlen import fill_hints
from torch_paged_attn.ops.signature import described, schema


def check(*args: Any, **kwargs: Any) -> None:
    """Raise for metadata the contract forbids."""
    check_backward(BackwardCall.flash_varlen(*args, **kwargs))


def check_values(*args: Any, **kwargs: Any) -> None:
    """Raise for lengths that point outside. Reads tensors."""
    check_attention_values(BackwardCall.flash_varlen(*args, **kwargs).named_forward())


def fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """What the op returns, in shape and dtype."""
    return BackwardCall.flash_varlen(*args, **kwargs).new_results()


_flash_varlen_backward = define(
    schema("flash_varlen_backward"),
    check=check,
    check_values=check_values,
    fake=fake,
    derivative=Once("flash_varlen_backward"),
)


@described
def flash_varlen_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *tensors: Tensor | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The gradients of a loss by the inputs of `flash_varlen`, from those by its results.

    Autograd calls this for a `flash_varlen` whose inputs require grad. With `s` the final logits of
    the forward, `s0` those before ALiBi and bias, everything in float32:

        P  = exp(s - softmax_lse)              0 where masked, and in a row that sees no key
        dP = (dout . v) / (1 - dropout_p)      0 where dropped
        D  = rowsum(dout * out) - dlse
        dS = P * (dP - D)
        dbias = dS            dsinks = -sum(exp(sink - softmax_lse) * D) over the rows
        dX = dS * (1 - (s0 / softcap)^2)       with a softcap
        dq = softmax_scale * dX @ k            dk = softmax_scale * dX^T @ q
        dv = (P, dropped and scaled)^T @ dout

    `dk` and `dv` of a KV head sum over its query heads, and what is broadcast in `attn_bias` (one
    head for all) sums over what it is broadcast to. P and dX may be rounded to q's dtype as
    operands of a product; everything else is float32, and the results are rounded once.

    A row that sees no key has no gradient, whatever its `dout` and `dlse` hold, NaN included, and
    so have padding rows and keys that no query sees. Memory that no query may see is not read.

    **A part of the keys.** With `out`, `softmax_lse`, `dout` and `dlse` of attention over more keys
    than `k` and `v` hold (such as `merge_states` makes it of parts), the results are exactly the
    share of these keys: `dk` and `dv` are theirs, and `dq` adds up over the parts. Ring attention
    needs nothing else.

    Args:
        {arguments}

    Returns:
        dq, dk, dv: like q, k and v, contiguous.
        dbias: like attn_bias, contiguous; 0 where no pair of query and key uses it.
        dsinks: like sinks.
        What is not asked for, or has no input (a bool attn_bias has no gradient), is an empty
        tensor `(0,)` of q's dtype.

    Raises:
        ValueError: a shape, dtype, device, stride or option outside the above, or (CPU) malformed
            lengths.
        NotImplementedError: a call that the backend refuses; by autograd, a gradient of these
            gradients.

    Sources: FlashAttention-2 (arXiv 2307.08691), algorithm 2.
    """
    first = dout, dlse, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k
    hints = fill_hints(q, k, None, max_seqlen_q, max_seqlen_k)
    return _flash_varlen_backward(*first, *hints, *tensors, **options)
