"""`Selection`: the arguments of `selected_attention` that say which keys a query token sees."""

import dataclasses

from torch import Tensor

from torch_paged_attn.argument import argument

# arguments of flash_varlen that selected_attention does not have
NOT_SELECTED = frozenset(
    (
        *("attn_bias", "alibi_slopes", "rng_state", "tail_mask", "dropout_p"),
        *("key_ranks", "key_rank", "key_interleave"),
    )
)


@dataclasses.dataclass(slots=True, eq=False)
class Selection:
    """A list of units of keys for each query token: `select_size` neighbouring keys each."""

    key_indices: Tensor = argument(
        shape="`(total_q, G, K)` int32",
        meaning="G is 1 (all heads share a list) or num_kv_heads. An entry `u >= 0` selects keys"
        " `u * select_size` to `(u + 1) * select_size - 1` of the token's own sequence, as far as"
        " they are below Lk; a negative entry selects nothing and may stand anywhere. In any order;"
        " a list names no unit twice.",
    )
    num_selected: Tensor | None = argument(
        None,
        shape="`(total_q, G)` int32",
        meaning="How many entries of each list are read, from the first one on; None: all K.",
    )
    select_size: int = argument(1, meaning="Keys of a unit: 1 or a power of two up to 256.")
