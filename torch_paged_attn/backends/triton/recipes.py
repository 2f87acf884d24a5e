"""Attention calls that were checked, planned and launched once, ready to be launched again.

A decode step calls with the same shapes, layer after layer; what it may cost on the host is a few
microseconds. A recipe belongs to the description of a call: dtypes, shapes, strides and alignment
of its tensors, and its options. Lengths, tables and hints are not part of it. There are at most
MOST_RECIPES of them; compiled kernels are shared by recipes, and do not multiply with them.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.backends.triton.counters import zeroed_counters
from torch_paged_attn.backends.triton.launch import Relaunch, describe

MOST_RECIPES = 4096

_recipes: dict[Any, "Recipe"] = {}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The launch, and what is allocated for it."""

    relaunch: Relaunch
    out_shape: torch.Size
    out_dtype: torch.dtype
    part_elements: int
    num_counters: int
    has_dropout: bool

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
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
        layout: tuple[Tensor | None, Tensor | None] = (None, None),
        **_options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Arguments as in `attend`, of the recipe's description."""
        out = q.new_empty(self.out_shape, dtype=self.out_dtype)
        lse = q.new_empty(self.out_shape[1::-1], dtype=torch.float32)
        parts = counters = None
        if self.part_elements:
            parts = q.new_empty(self.part_elements, dtype=torch.float32)
            counters = zeroed_counters(q.device, self.num_counters)
        if not self.has_dropout:
            rng_state = None
        self.relaunch(
            (
                q, k, v, out, lse, parts, counters, cu_seqlens_q, cu_seqlens_k, seqused_k,
                block_table, *layout, attn_bias, alibi_slopes, sinks, q_descale, k_descale,
                v_descale, out_scale, rng_state,
            )
        )  # fmt: skip
        return out, lse


def key_of(op: str, hints: int, mode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The description of a call: two arguments from number `hints` on are left out of it. None
    where the call must be checked again.
    """
    if min(args[hints : hints + 2], default=-1) < 0:
        return None
    tensors = *map(describe, args[:hints]), *map(describe, args[hints + 2 :])
    options = tuple((name, describe(value)) for name, value in kwargs.items())
    return op, mode, tensors, options


def recall(key: Any) -> Recipe | None:
    """The recipe of a description, if such a call was launched before."""
    return _recipes.get(key)


def remember(key: Any, recipe: Recipe) -> None:
    """Keep a recipe for calls of this description."""
    if key is not None:
        if len(_recipes) >= MOST_RECIPES:
            _recipes.clear()
        _recipes[key] = recipe
