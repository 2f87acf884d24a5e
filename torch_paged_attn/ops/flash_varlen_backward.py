"""Contract of `paged_attn::flash_varlen_backward`: the gradients of `flash_varlen`'s inputs."""

from typing import Any

from torch import Tensor

from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops._gradients import OnceDifferentiable
from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.accepted import operator_of
from torch_paged_attn.ops.attention_checks import check_attention_values
from torch_paged_attn.ops.attention_gradients import check_backward
from torch_paged_attn.ops.flash_varlen import fill_hints
from torch_paged_attn.ops.kinds import call_operator
from torch_paged_attn.ops.paths import public
from torch_paged_attn.ops.signature import described, schema


def check(*args: Any, **kwargs: Any) -> None:
    """Raise for metadata that the contract forbids."""
    check_backward(BackwardCall.flash_varlen(*args, **kwargs))


def check_values(*args: Any, **kwargs: Any) -> None:
    """Raise for lengths out of range. Reads tensors on the host."""
    check_attention_values(BackwardCall.flash_varlen(*args, **kwargs).named_forward())


def fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Empty results of the op's shapes and dtypes."""
    return BackwardCall.flash_varlen(*args, **kwargs).new_results()


_flash_varlen_backward = operator_of(
    define(
        schema("flash_varlen_backward"),
        check=check,
        check_values=check_values,
        fake=fake,
        call=BackwardCall.flash_varlen,
        derivative=OnceDifferentiable("flash_varlen_backward"),
    )
)


@public
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
    """The gradients of `flash_varlen`'s inputs, from the gradients of its results.

    Autograd calls this for a `flash_varlen` whose inputs require grad. With `s` the final logits of
    the forward and `s0` the logits before ALiBi and bias, everything in float32:

        P  = exp(s - softmax_lse)              0 where masked, and in a row that sees no key
        dP = (dout . v) / (1 - dropout_p)      0 where dropped
        D  = rowsum(dout * out) - dlse
        dS = P * (dP - D)
        dbias = dS            dsinks = -sum(exp(sink - softmax_lse) * D) over the rows
        dX = dS * (1 - (s0 / softcap)^2)       with a softcap
        dq = softmax_scale * dX @ k            dk = softmax_scale * dX^T @ q
        dv = (P, dropped and scaled)^T @ dout

    `dk` and `dv` of a KV head are sums over its query heads; `dbias` of an `attn_bias` with one
    head is a sum over all heads. P and dX may be rounded to q's dtype as operands of a product;
    everything else is float32, and the results are rounded once.

    Gradients of rows that see no key, of padding rows, and of keys that no query sees are 0,
    whatever `dout` and `dlse` hold there, NaN included. Memory that no query may see is not read.

    **Some of the keys.** `k` and `v` may hold only some of the keys that the forward attended to,
    as in ring attention: pass `out`, `softmax_lse`, `dout` and `dlse` of the attention over all
    keys (from `merge_states`). `dk` and `dv` are then exact, and `dq` is the sum of the results of
    all such calls.

    Args:
        {arguments}

    Returns:
        dq, dk, dv: like q, k and v, contiguous.
        dbias: like attn_bias, contiguous; 0 where no pair of query and key uses it.
        dsinks: like sinks.
        A gradient that `output_mask` does not ask for, or whose input is missing or a bool
        attn_bias, is an empty tensor `(0,)` of q's dtype.

    Raises:
        TypeError: an argument of the wrong type, such as a list for a tensor.
        ValueError: a shape, dtype, device, stride or option outside the above, or (CPU) malformed
            lengths.
        NotImplementedError: the backend does not support the call; or autograd differentiates the
            result, since there is no double backward.

    Sources: FlashAttention-2 (arXiv 2307.08691), algorithm 2.
    """
    first = dout, dlse, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k
    hints = fill_hints(q, k, None, max_seqlen_q, max_seqlen_k)
    args = *first, *hints, *tensors
    return call_operator(_flash_varlen_backward, args, options)
