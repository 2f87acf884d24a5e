"""`torch.nn.functional.scaled_dot_product_attention` on CPUs, where a table says ours is faster.

    import torch_paged_attn
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    activate_flash_attention_impl("PAGED_ATTN_SDPA")

Only calls like those go to `flash_varlen` in which a benchmark (benchmarks/sdpa.py) saw it ahead of
PyTorch's kernel on processors of the same family: `sdpa_table.json`. All others run
PyTorch's kernel, the very one that ran before, with the same bits: other dtypes and sizes, masks,
dropout, causal calls whose queries are not as many as the keys (PyTorch aligns these at the first
key). Gradients are PyTorch's own in either case: its backward takes our results.

`restore_flash_attention_impl()` takes the kernel back. Works with torch 2.11 to 2.15.
"""

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn import _processor
from torch_paged_attn.integrations._arguments import of_equal_lengths
from torch_paged_attn.integrations.torch_attention import Handle
from torch_paged_attn.ops import flash_varlen

OP = "_scaled_dot_product_flash_attention_for_cpu"
TABLE = Path(__file__).with_name("sdpa_table.json")

# how much faster than PyTorch's kernel a call of the table has to be
AHEAD = 1.05

# heads of all sequences, in the smallest calls of the table
LEAST_HEADS = 8


class Sdpa:
    """The kernel that stands in PyTorch's place, and PyTorch's own."""

    def __init__(self, processor: str) -> None:
        self.native = torch.library.get_kernel(f"aten::{OP}", "CPU")
        self.table = Table.of(processor)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """query: (batch, num_heads, L, head_dim); key, value: (batch, num_kv_heads, S, head_dim).

        Returns output like query, and logsumexp (batch, num_heads, L) float32.
        """
        has_rows = query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        if attn_mask is None and dropout_p == 0.0 and has_rows:
            batch, heads, queries, dim = query.shape
            kv_heads, keys = key.shape[1:3]
            sizes = batch * heads, heads // max(kv_heads, 1), queries, keys, dim
            if self.table.is_ahead(query.dtype, is_causal, *sizes):
                return attend(query, key, value, is_causal, scale)
        return self.native.call_boxed(
            torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
            *(query, key, value, dropout_p, is_causal),
            attn_mask=attn_mask,
            scale=scale,
        )


class Table:
    """How many times as fast as PyTorch's kernel ours was, by the kind of a call and its number of
    keys."""

    def __init__(self, ratios: dict[tuple[Any, ...], dict[int, float]]) -> None:
        self.ratios = ratios
        # a table of a few hundred kinds of calls; models make few of them
        self.is_ahead = functools.lru_cache(maxsize=1024)(self._is_ahead)

    @classmethod
    def of(cls, processor: str) -> "Table":
        """What was measured on a family of processors; nothing for one on which nothing was."""
        ratios: dict[tuple[Any, ...], dict[int, float]] = {}
        for cell in json.loads(TABLE.read_text())["processors"].get(processor, {}).get("cells", ()):
            kind = cell["dtype"], cell["kind"], cell["head_dim"], cell["group_size"]
            ratios.setdefault(kind, {})[cell["keys"]] = cell["ratio"]
        return cls(ratios)

    def _is_ahead(
        self, dtype: torch.dtype, is_causal: bool, heads: int, group_size: int, *sizes: int
    ) -> bool:
        """Whether ours was faster in all calls of the table between which this one lies."""
        queries, keys, head_dim = sizes
        if (kind := kind_of(is_causal, queries, keys)) is None or heads < LEAST_HEADS:
            return False
        name = str(dtype).removeprefix("torch.")
        kinds = [x for x in self.ratios if x[:2] == (name, kind)]
        dims = around(head_dim, {x[2] for x in kinds})
        groups = around(group_size, {x[3] for x in kinds})
        beside = [self.ratios[name, kind, d, g] for d in dims for g in groups]
        found = [cells[n] for cells in beside for n in around(keys, set(cells))]
        # as many as there must be: a call outside of the table lies between none
        is_inside = beside and all(around(keys, set(cells)) for cells in beside)
        return bool(is_inside) and min(found) >= AHEAD


def kind_of(is_causal: bool, queries: int, keys: int) -> str | None:
    """`"decode"`, `"prefill"` or `"encoder"`; None for what is none of these."""
    if queries == keys and queries > 1:
        return "prefill" if is_causal else "encoder"
    return "decode" if queries == 1 and not is_causal else None


def around(x: int, known: set[int]) -> set[int]:
    """The neighbours among the known numbers between which x lies, or itself; none outside."""
    if not known or not min(known) <= x <= max(known):
        return set()
    return {max(n for n in known if n <= x), min(n for n in known if n >= x)}


def attend(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The call by `flash_varlen`. PyTorch has passed autograd, and differentiates by itself."""
    batch, heads, queries, _ = query.shape
    with torch.no_grad():
        tensors = of_equal_lengths(*(x.transpose(1, 2) for x in (query, key, value)))
        packed, lse = flash_varlen(**tensors, softmax_scale=scale, causal=is_causal)
    found = packed.view(batch, queries, heads, -1).transpose(1, 2)
    # graphs count on PyTorch's strides: those of query, and of queries before heads
    out = torch.empty_like(query)
    if out.stride() == found.stride():
        out = found
    else:
        out.copy_(found)
    lse_out = lse.new_empty(batch, queries, heads).transpose(1, 2)
    return out, lse_out.copy_(lse.view(heads, batch, queries).transpose(0, 1))


def activate() -> Handle:
    """Register the kernel, for `torch.nn.attention.activate_flash_attention_impl`.

    Raises:
        RuntimeError: the CPU kernels of this package are not here.
    """
    from torch_paged_attn.backends.cpu import BACKEND

    if (reason := BACKEND.unsupported()) is not None:
        raise RuntimeError(f"PAGED_ATTN_SDPA stands in for PyTorch's CPU kernel, and {reason}")
    kernel = Sdpa(_processor.family())
    library = torch.library.Library("aten", "IMPL", "CPU")
    with warnings.catch_warnings():
        # that a kernel takes another's place is what was asked for
        warnings.filterwarnings("ignore", "(?s).*verrid")
        library.impl(OP, kernel.__call__, "CPU", allow_override=True)
    return Handle(library)
