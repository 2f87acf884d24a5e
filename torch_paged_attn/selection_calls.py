"""`MassCall` and `SelectKeysCall`: the arguments of `selected_mass` and of `select_keys`."""

import dataclasses
import functools
from typing import Any

from torch import Tensor

from torch_paged_attn import attention_call
from torch_paged_attn.argument import Argument, argument, listed
from torch_paged_attn.attention_call import DESCALE, HINT, AttentionCall
from torch_paged_attn.selection import Selection

# arguments of selected_attention that its masses do not depend on, or that need v
NOT_OF_MASS = frozenset(("v", "sinks", "v_descale", "out_scale", "out_dtype", "deterministic"))
# the optional ones that they take
OPTIONAL_OF_MASS = frozenset(("k_start", "q_position"))


@dataclasses.dataclass(slots=True, eq=False)
class MassCall:
    """One call of `selected_mass`."""

    attention: AttentionCall  # with k for v, which no mass depends on
    softmax_lse: Tensor = argument(
        shape="`(num_heads, total_q)` float32",
        meaning="As `selected_attention` returned it. It may be that of more keys than k holds: the"
        " masses are then shares of all of them.",
    )

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> "MassCall":
        """From the arguments of the operator `selected_mass`."""
        names = [x.name for x in arguments("selected_mass")[: len(args)]]
        given = dict(zip(names, args, strict=True)) | kwargs
        lse = given.pop("softmax_lse")
        call = AttentionCall.selected_attention(v=given["k"], **given)
        return cls(dataclasses.replace(call, op="selected_mass"), lse)

    @property
    def selection(self) -> Selection:
        """The lists of keys."""
        assert self.attention.selection is not None
        return self.attention.selection

    def new_result(self) -> Tensor:
        """Memory for the masses, contiguous."""
        shape = self.selection.key_indices.shape
        return self.attention.q.new_empty(shape, dtype=self.softmax_lse.dtype)


SCORES = "relu", "identity"
POOLS = "max", "mean", "sum"


@dataclasses.dataclass(eq=False)
class SelectKeysCall:
    """One call of `select_keys`."""

    q: Tensor = argument(
        shape="`(total_q, num_index_heads, head_dim)`",
        meaning="Index queries: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2.",
    )
    k: Tensor = argument(
        shape="`(total_k, G, head_dim)`",
        meaning="Index keys; with `block_table` pages `(num_pages, G, page_size, head_dim)`. Of q's"
        " dtype, or float8 or int8. Any strides whose last one is 1. G divides num_index_heads:"
        " index head `h` belongs to group `h // (num_index_heads // G)`.",
    )
    weights: Tensor | None = argument(
        shape="`(total_q, num_index_heads)` float32, bfloat16 or float16",
        meaning="Weight of each head's score; None: 1.",
    )
    cu_seqlens_q: Tensor = argument(
        shape="`(batch + 1,)` int32", meaning="Nondecreasing, from 0 to at most `total_q`."
    )
    cu_seqlens_k: Tensor | None = argument(
        None,
        shape="`(batch + 1,)` int32",
        meaning="As in `flash_varlen`: where packed keys start, or Lk of pages.",
    )
    max_seqlen_q: int = argument(0, meaning=HINT, is_hint=True)
    max_seqlen_k: int = argument(0, meaning=HINT, is_hint=True)
    seqused_k: Tensor | None = argument(None, shape="`(batch,)` int32", meaning="`Lk`.")
    block_table: Tensor | None = argument(
        None,
        shape="`(batch, max_pages)` int32",
        meaning="As in `flash_varlen`: the pages of each sequence.",
    )
    q_descale: Tensor | None = argument(
        None, **DESCALE | {"shape": "`()`, `(G,)` or `(batch, G)` float32"}
    )
    k_descale: Tensor | None = argument(
        None, **DESCALE | {"shape": "`()`, `(G,)` or `(batch, G)` float32"}
    )
    q_position: Tensor | None = argument(
        None,
        shape="`(batch,)` int32",
        meaning="Position of a sequence's first query, instead of `Lk - Lq`; may be negative.",
    )
    _: dataclasses.KW_ONLY
    num_units: int = argument(
        meaning="Units to select for each token and group; at least force_first + force_last."
    )
    select_size: int = argument(1, meaning="Keys of a unit: 1 or a power of two up to 256.")
    score: str = argument(
        "relu", meaning='"relu" or "identity": what is applied to `q . k` before the weights.'
    )
    pool: str = argument(
        "max", meaning='"max", "mean" or "sum": the score of a unit from those of its visible keys.'
    )
    causal: bool = argument(True, meaning="Hide the keys that come after the query.")
    force_first: int = argument(0, meaning="So many first units are always selected.")
    force_last: int = argument(
        0, meaning="So many units up to the one of the token's position are always selected."
    )

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> "SelectKeysCall":
        """From the arguments of the operator `select_keys`."""
        return cls(*args, **kwargs)

    def attention(self) -> AttentionCall:
        """The same queries and keys as a call of attention: G heads of keys, whose values no result
        depends on.
        """
        return AttentionCall(
            "select_keys",
            self.q,
            self.k,
            self.k,
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            self.max_seqlen_q,
            self.max_seqlen_k,
            self.seqused_k,
            self.block_table,
            q_descale=self.q_descale,
            k_descale=self.k_descale,
            q_position=self.q_position,
            causal=self.causal,
        )

    def tensors(self) -> dict[str, Tensor | None]:
        """Every tensor argument by its name, None if it was not given."""
        return {x.name: getattr(self, x.name) for x in listed(SelectKeysCall) if x.is_tensor}

    @property
    def groups(self) -> int:
        """G: heads of index keys, each of which has lists of its own."""
        return self.k.shape[1]

    def new_results(self) -> tuple[Tensor, Tensor]:
        """Memory for key_indices and num_selected, contiguous."""
        shape = self.q.shape[0], self.groups
        key_indices = self.cu_seqlens_q.new_empty((*shape, self.num_units))
        return key_indices, self.cu_seqlens_q.new_empty(shape)


@functools.cache
def arguments(op: str) -> tuple[Argument, ...]:
    """What `selected_mass` or `select_keys` takes, in the order of its schema."""
    if op == "select_keys":
        return tuple(sorted(listed(SelectKeysCall), key=lambda x: x.keyword_only))
    found = [
        x
        for x in attention_call.arguments("selected_attention")
        if x.name not in NOT_OF_MASS and (not x.is_optional or x.name in OPTIONAL_OF_MASS)
    ]
    at = [x.name for x in found].index("key_indices")
    return *found[:at], *listed(MassCall), *found[at:]
