"""Packed batches, drawn as small plain numbers, and what is right for them."""

import dataclasses
import os
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_paged_attn import reference
from torch_paged_attn.testing import Gradients, Truth

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


@dataclasses.dataclass(frozen=True)
class Pack:
    """Documents end to end, and a call of attention over them."""

    lengths: tuple[int, ...]
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    options: tuple[tuple[str, Any], ...] = ()
    sinks: bool = False
    alibi: str = ""
    seed: int = 0
    ranks: int = 4  # of a world that has as many, or more

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0).int()

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        tokens = sum(self.lengths)
        heads = self.num_heads, self.num_kv_heads, self.num_kv_heads
        q, k, v = (torch.randn(tokens, h, self.head_dim, generator=g).to(self.dtype) for h in heads)
        return q, k, v

    def call(self) -> dict[str, Any]:
        """Options and tensors beside q, k and v."""
        g = torch.Generator().manual_seed(self.seed + 1)
        found = dict(self.options)
        if self.sinks:
            found["sinks"] = torch.randn(self.num_heads, generator=g)
        if self.alibi:
            rows = (len(self.lengths),) if self.alibi == "batch" else ()
            found["alibi_slopes"] = torch.rand(*rows, self.num_heads, generator=g)
        return found

    def gradients_in(self) -> tuple[Tensor, Tensor]:
        """What a loss hands back for `out` and `softmax_lse`."""
        g = torch.Generator().manual_seed(self.seed + 2)
        tokens = sum(self.lengths)
        dout = torch.randn(tokens, self.num_heads, self.head_dim, generator=g).to(self.dtype)
        return dout, torch.randn(self.num_heads, tokens, generator=g)

    def _args(self) -> dict[str, Any]:
        q, k, v = self.inputs()
        given = {"q": q, "k": k, "v": v, "cu_seqlens_q": self.cu_seqlens}
        return given | {"max_seqlen_q": 0, "max_seqlen_k": 0} | self.call()

    def truth(self) -> Truth:
        return Truth.of(reference.flash_varlen, **self._args())

    def gradients(self) -> Gradients:
        return Gradients.by_reference("flash_varlen", self._args(), *self.gradients_in())


lengths = st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(30, 120))


@st.composite
def packs(draw: Any) -> Pack:
    causal = draw(st.booleans())
    options: dict[str, Any] = {"causal": causal}
    alibi = ""
    if draw(st.booleans()):
        options["softcap"] = 5.0
    if causal and draw(st.booleans()):  # what only all-gather and Ulysses have
        options["window_size_left"] = draw(st.integers(0, 50))
        alibi = draw(st.sampled_from(("", "heads", "batch")))
    return Pack(
        tuple(draw(st.lists(lengths, max_size=7))),
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16))),
        options=tuple(options.items()),
        sinks=draw(st.booleans()),
        alibi=alibi,
        seed=draw(st.integers(0, 1000)),
        ranks=draw(st.integers(2, 4)),
    )


def drawn(strategy: Any, few: int, many: int) -> list[Any]:
    """Examples, drawn before processes part: the same ones for all of them."""
    found: list[Any] = []

    @settings(
        max_examples=many if IS_THOROUGH else few,
        derandomize=not IS_THOROUGH,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def keep(example: Any) -> None:
        found.append(example)

    keep()
    return found


PACKS = drawn(packs(), 12, 300)
