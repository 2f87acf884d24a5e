"""Contract of `paged_attn::flash_varlen_out`: `flash_varlen` into a tensor of the caller's."""

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.accepted import operator_of
from torch_paged_attn.ops.attention_checks import check_attention, check_attention_values
from torch_paged_attn.ops.checks import (
    FLOAT8,
    QUERY,
    check_dim,
    check_dtype,
    check_rows,
    check_shape,
    fail,
)
from torch_paged_attn.ops.flash_varlen import fill_hints, refuse_twice
from torch_paged_attn.ops.kinds import call_operator
from torch_paged_attn.ops.paths import public
from torch_paged_attn.ops.signature import described, schema

OP = "flash_varlen_out"


def check_out(call: AttentionCall) -> None:
    """Raise for metadata that the contract forbids."""
    check_dim(OP, "out", call.out, "(total_q, num_heads, head_dim_v)")
    check_dtype(OP, "out", call.out, QUERY)
    check_attention(call)
    out = call.out
    assert out is not None
    check_dtype(OP, "out", out, tuple(dict.fromkeys((call.q.dtype, *FLOAT8))))
    sizes = call.total_q, call.num_heads, call.head_dim_v
    check_shape(OP, "out", out, sizes, "(total_q, num_heads, head_dim_v)")
    check_rows(OP, "out", out)
    if _meets_itself(out):
        fail(OP, "out", f"strides {out.stride()}", "free of rows that overlap")
    check_apart(call)


def _meets_itself(out: Tensor) -> bool:
    """Whether two rows of `out` share memory: as of a tensor that `expand` has made."""
    if out.numel() == 0:
        return False
    end = out.shape[-1]
    axes = zip(out.stride()[:-1], out.shape[:-1], strict=True)
    for stride, size in sorted(axis for axis in axes if axis[1] > 1):
        if stride < end:
            return True
        end = stride * (size - 1) + end
    return False


def span(x: Tensor) -> int:
    """The bytes from a tensor's first element to the end of its last one; 0 if it has none."""
    if x.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.itemsize


def check_apart(call: AttentionCall) -> None:
    """Raise if `out` shares memory with an input. Tensors without addresses, such as those of a
    traced graph, pass.
    """
    given = call.given_tensors()
    if not all(map(_has_address, given.values())):
        return
    out = given.pop("out")
    start, end = out.data_ptr(), out.data_ptr() + span(out)
    for name, x in given.items():
        if x.data_ptr() < end and start < x.data_ptr() + span(x):
            refuse_overlap(name)


def refuse_overlap(name: str) -> None:
    """Raise the error for an input that `out` shares memory with."""
    fail(OP, "out", f"memory of {name}", "in memory of its own")


def _has_address(x: Tensor) -> bool:
    return x.device.type in ("cpu", "cuda") and not isinstance(x, FakeTensor)


def check(*args: Any, **kwargs: Any) -> None:
    """Raise for metadata that the contract forbids."""
    check_out(AttentionCall.flash_varlen_out(*args, **kwargs))


def check_values(*args: Any, **kwargs: Any) -> None:
    """Raise for lengths and page ids out of range. Reads tensors on the host."""
    check_attention_values(AttentionCall.flash_varlen_out(*args, **kwargs))


def fake(*args: Any, **kwargs: Any) -> Tensor:
    """An empty `softmax_lse`."""
    return AttentionCall.flash_varlen_out(*args, **kwargs).new_results()[1]


_flash_varlen_out = operator_of(
    define(
        schema(OP),
        check=check,
        check_values=check_values,
        fake=fake,
        call=AttentionCall.flash_varlen_out,
        autocast=True,
    )
)


@public
@described
def flash_varlen_out(
    out: Tensor,
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
) -> Tensor:
    """`flash_varlen`, whose result is written into `out`: the same bits, and no copy.

    For engines that own the memory of results. Rows past `cu_seqlens_q[-1]` are written too: 0.
    Under `torch.autocast` q, k and v are cast to `out`'s dtype, or to autocast's if `out` is
    float8. In a graph of torch.compile the call is one node, which changes `out` in place. The TPU
    and Neuron backends run `flash_varlen` and copy; so does a GPU if `out` has gaps or starts off a
    multiple of 16 bytes.

    Args:
        {arguments}

    Returns:
        `softmax_lse` `(num_heads, total_q)` float32, as `flash_varlen` returns it.

    Raises:
        ValueError: `out` has another shape or dtype, rows that share memory, or shares memory with
            an input; and whatever `flash_varlen` raises it for.
        NotImplementedError: a tensor requires grad: the op has no derivative, `flash_varlen` has.
        TypeError, IndexError, RuntimeError: as `flash_varlen`.
    """
    if tensors and options:
        refuse_twice(OP, tensors, options)
    if max_seqlen_q is None or max_seqlen_k is None:
        hints = fill_hints(q, k, block_table, max_seqlen_q, max_seqlen_k)
        max_seqlen_q, max_seqlen_k = hints
    first = out, q, k, v, cu_seqlens_q, cu_seqlens_k
    args = *first, max_seqlen_q, max_seqlen_k, seqused_k, block_table, *tensors
    return call_operator(_flash_varlen_out, args, options)
