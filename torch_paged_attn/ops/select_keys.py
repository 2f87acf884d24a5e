"""Contract of `paged_attn::select_keys`: the units of keys with the best index scores."""

from typing import Any

from torch import Tensor

from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.accepted import operator_of
from torch_paged_attn.ops.attention_checks import check_attention, check_attention_values
from torch_paged_attn.ops.checks import FLOAT, check_devices, check_dtype, check_shape, fail
from torch_paged_attn.ops.flash_varlen import fill_hints
from torch_paged_attn.ops.kinds import call_operator
from torch_paged_attn.ops.paths import public
from torch_paged_attn.ops.selected_checks import check_select_size
from torch_paged_attn.ops.signature import described, schema
from torch_paged_attn.selection_calls import POOLS, SCORES, SelectKeysCall


def check(*args: Any, **kwargs: Any) -> None:
    """Raise for metadata that the contract forbids."""
    check_call(SelectKeysCall.of(*args, **kwargs))


def check_call(call: SelectKeysCall) -> None:
    """The same of a call that was made of the arguments."""
    op = "select_keys"
    check_attention(call.attention())
    if (weights := call.weights) is not None:
        check_dtype(op, "weights", weights, FLOAT)
        check_shape(op, "weights", weights, call.q.shape[:2], "(total_q, num_index_heads)")
        check_devices(op, call.q.device, {"weights": weights})
    check_select_size(op, call.select_size)
    for name, given, known in (("score", call.score, SCORES), ("pool", call.pool, POOLS)):
        if given not in known:
            fail(op, name, repr(given), f"one of {', '.join(map(repr, known))}")
    # comparing a SymInt would put a guard on it
    for name in ("force_first", "force_last"):
        if isinstance(size := getattr(call, name), int) and size < 0:
            fail(op, name, f"{size}", "at least 0")
    sizes = call.num_units, call.force_first, call.force_last
    if all(isinstance(x, int) for x in sizes):
        forced = call.force_first + call.force_last
        if call.num_units < max(forced, 1):
            allowed = f"at least 1, and at least force_first + force_last = {forced}"
            fail(op, "num_units", f"{call.num_units}", allowed)


def check_values(*args: Any, **kwargs: Any) -> None:
    """Raise for lengths and page ids out of range. Reads tensors on the host."""
    check_attention_values(SelectKeysCall.of(*args, **kwargs).attention())


def fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Empty results of the op's shapes and dtypes."""
    return SelectKeysCall.of(*args, **kwargs).new_results()


_select_keys = operator_of(
    define(schema("select_keys"), check=check, check_values=check_values, fake=fake, autocast=True)
)


@public
@described
def select_keys(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    *tensors: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The `num_units` units of keys with the best scores, for each query token and group.

    The score of a key, in float32, with stored values times their descale:

        score[t, g, j] = sum over the index heads h of group g of
                         weights[t, h] * f(q[t, h] . k[j, g])       f: relu or identity

    The score of a unit is the maximum, mean or sum (`pool`) over those of its keys that the token
    sees: `j < Lk`, and under `causal` no later than the token. A unit without such a key is never
    selected. The first `force_first` units, and the last `force_last` up to the one of the token's
    own position (or of the last key, if that is earlier), are always among the selected.

    The ids are those of the formula wherever scores differ by more than the rounding of a float32
    sum, and among equal scores the smallest id wins. The same call gives the same ids. No
    `(total_q, total_k)` matrix is held in memory. The results fit `selected_attention` with the
    same `select_size`.

    Args:
        {arguments}

    Returns:
        `key_indices` `(total_q, G, num_units)` int32, ascending, with -1 after the last; and
        `num_selected` `(total_q, G)` int32, how many there are. Rows of padding select nothing.

    Raises:
        Those of `flash_varlen`; NotImplementedError if an input requires grad: an indexer is
        trained through the scores of the selected units, which the formula gives.

    Sources: DeepSeek-V3.2 (lightning indexer), MoBA (arXiv 2502.13189).
    """
    hints = fill_hints(q, k, block_table, max_seqlen_q, max_seqlen_k)
    first = q, k, weights, cu_seqlens_q, cu_seqlens_k
    args = *first, *hints, seqused_k, block_table, *tensors
    return call_operator(_select_keys, args, options)
