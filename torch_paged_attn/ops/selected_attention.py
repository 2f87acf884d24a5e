"""Contract of `paged_attn::selected_attention`: attention to the keys that a list names."""

from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, tensor_names
from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.accepted import operator_of
from torch_paged_attn.ops.attention_gradients import AttentionDerivative
from torch_paged_attn.ops.flash_varlen import fill_hints
from torch_paged_attn.ops.kinds import call_operator
from torch_paged_attn.ops.paths import public
from torch_paged_attn.ops.selected_checks import check_selected, check_selected_values
from torch_paged_attn.ops.signature import described, schema


def check(*args: Any, **kwargs: Any) -> None:
    """Raise for metadata that the contract forbids."""
    check_selected(AttentionCall.selected_attention(*args, **kwargs))


def check_values(*args: Any, **kwargs: Any) -> None:
    """Raise for lengths, lists and page ids out of range. Reads tensors on the host."""
    check_selected_values(AttentionCall.selected_attention(*args, **kwargs))


def fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Empty results of the op's shapes and dtypes."""
    return AttentionCall.selected_attention(*args, **kwargs).new_results()


_selected_attention = operator_of(
    define(
        schema("selected_attention"),
        check=check,
        check_values=check_values,
        fake=fake,
        call=AttentionCall.selected_attention,
        derivative=AttentionDerivative("selected_attention"),
        autocast=True,
        has_plan=True,
    )
)

_TENSORS = tensor_names("selected_attention")
# the tensors that the public function passes on as `*tensors`
_BEHIND_BLOCK_TABLE = _TENSORS[_TENSORS.index("block_table") + 1 :]


@public
@described
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_indices: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    *tensors: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attend each query token to the keys that a list of its own names, exactly.

    `flash_varlen` with one more mask: a key is visible if the token's list names its unit and every
    mask lets it through, so that the causal mask also holds within a unit. With all units listed
    the result is that of `flash_varlen`; the order of a list changes rounding alone. Cost follows
    the number of selected keys. This one op serves DeepSeek's DSA and GLM's (single keys, one list
    for all heads), MiniMax M3, NSA, MoBA and Quest (blocks of keys, a list for each KV head) and
    Qwen's QSA (units of 4 keys).

    **Pages and slots.** With `block_table`, entries name units of the token's own sequence, and the
    table leads to the pages. Without it, k and v may be pages all the same; entries then name units
    of the cache itself, `slot // select_size`, where slot is `page * page_size + offset`. Such
    entries have no position: `causal` has to be False, windows, lengths, `k_start` and `q_position`
    are refused, and `select_size` divides the page size. An entry past the cache selects nothing.

    A token with nothing selected has `out = 0` and `softmax_lse = -inf` (with a sink:
    `softmax_lse = sink`). Keys that no list names may hold anything, NaN included, and so may
    block_table entries that lead to no selected key.

    **Two caches** (a window, and compressed keys): two calls and `merge_states`, with the sinks in
    one of them. Keys on other ranks: -1 in the list, then merge.

    Args:
        {arguments}

    Returns:
        `out` `(total_q, num_heads, head_dim_v)` and `softmax_lse` `(num_heads, total_q)` float32,
        as `flash_varlen` returns them.

    Raises:
        Those of `flash_varlen`, and (CPU) ValueError for a list that names a unit twice or for
        num_selected out of range. On accelerators a unit that is named twice may count twice, and
        nothing else happens.

    Sources: DeepSeek-V3.2 (DSA), Native Sparse Attention (arXiv 2502.11089), MoBA
    (arXiv 2502.13189), Quest (arXiv 2406.10774).
    """
    for name in _BEHIND_BLOCK_TABLE[: len(tensors)] if options else ():
        if name in options:
            raise TypeError(f"selected_attention(): got multiple values for argument {name!r}")
    first = q, k, v, key_indices, cu_seqlens_q, cu_seqlens_k
    hints = fill_hints(q, k, block_table, max_seqlen_q, max_seqlen_k)
    args = *first, *hints, seqused_k, block_table, *tensors
    return call_operator(_selected_attention, args, options)
