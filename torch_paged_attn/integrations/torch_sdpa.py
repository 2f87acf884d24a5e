"""A CPU kernel for `torch.nn.functional.scaled_dot_product_attention`, for calls where it is
faster.

    import torch_paged_attn
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    activate_flash_attention_impl("PAGED_ATTN_SDPA")

A call runs on `flash_varlen` if a benchmark (benchmarks/sdpa.py) has found it faster than PyTorch's
kernel for such calls on processors of the same family; `sdpa_table.json` has the results. All other
calls run PyTorch's kernel as before, with the same bits: other dtypes and sizes, masks, dropout,
and causal calls with different numbers of queries and keys (where PyTorch's causal mask is aligned
to the top left). Gradients are always computed by PyTorch's backward.

`restore_flash_attention_impl()` removes the kernel. Works with torch 2.11 to 2.15.
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
from torch_paged_attn.ops.backend import serving

OP = "_scaled_dot_product_flash_attention_for_cpu"
TABLE = Path(__file__).with_name("sdpa_table.json")

# a call runs on flash_varlen if the table says that it is at least so many times as fast
AHEAD = 1.05

# batch * num_heads of the smallest calls in the table
LEAST_HEADS = 8


class Sdpa:
    """The kernel that replaces PyTorch's, and calls PyTorch's for other calls."""

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
    """How many times as fast as PyTorch's kernel `flash_varlen` is: kind of call -> number of keys
    -> ratio. A kind is (dtype, "decode" or "prefill" or "encoder", head_dim, group_size).
    """

    def __init__(self, ratios: dict[tuple[Any, ...], dict[int, float]]) -> None:
        self.ratios = ratios
        # a model makes few different calls, and looking one up in the table takes long
        self.is_ahead = functools.lru_cache(maxsize=1024)(self._is_ahead)

    @classmethod
    def of(cls, processor: str) -> "Table":
        """The measurements on a family of processors (`_processor.family()`); empty if there are
        none.
        """
        ratios: dict[tuple[Any, ...], dict[int, float]] = {}
        for cell in json.loads(TABLE.read_text())["processors"].get(processor, {}).get("cells", ()):
            kind = cell["dtype"], cell["kind"], cell["head_dim"], cell["group_size"]
            ratios.setdefault(kind, {})[cell["keys"]] = cell["ratio"]
        return cls(ratios)

    def _is_ahead(
        self, dtype: torch.dtype, is_causal: bool, heads: int, group_size: int, *sizes: int
    ) -> bool:
        """Whether `flash_varlen` was faster in all measured calls next to this one: those with the
        next smaller and the next larger head_dim, group_size and number of keys.
        """
        queries, keys, head_dim = sizes
        if (kind := kind_of(is_causal, queries, keys)) is None or heads < LEAST_HEADS:
            return False
        name = str(dtype).removeprefix("torch.")
        kinds = [x for x in self.ratios if x[:2] == (name, kind)]
        dims = around(head_dim, {x[2] for x in kinds})
        groups = around(group_size, {x[3] for x in kinds})
        beside = [self.ratios[name, kind, d, g] for d in dims for g in groups]
        found = [cells[n] for cells in beside for n in around(keys, set(cells))]
        # a call outside the table's range has no neighbours
        is_inside = beside and all(around(keys, set(cells)) for cells in beside)
        return bool(is_inside) and min(found) >= AHEAD


def kind_of(is_causal: bool, queries: int, keys: int) -> str | None:
    """`"decode"`, `"prefill"` or `"encoder"`; None for other calls."""
    if queries == keys and queries > 1:
        return "prefill" if is_causal else "encoder"
    return "decode" if queries == 1 and not is_causal else None


def around(x: int, known: set[int]) -> set[int]:
    """The largest known number up to x and the smallest from x on; empty if x is out of range."""
    if not known or not min(known) <= x <= max(known):
        return set()
    return {max(n for n in known if n <= x), min(n for n in known if n >= x)}


def attend(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The call on `flash_varlen`, without gradients: PyTorch's autograd has recorded the call."""
    batch, heads, queries, _ = query.shape
    with torch.no_grad():
        tensors = of_equal_lengths(*(x.transpose(1, 2) for x in (query, key, value)))
        packed, lse = flash_varlen(**tensors, softmax_scale=scale, causal=is_causal)
    found = packed.view(batch, queries, heads, -1).transpose(1, 2)
    # compiled graphs expect the strides of PyTorch's kernel
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
        RuntimeError: this package's CPU kernels cannot run here.
    """
    backend, reason = serving("CPU")
    if backend is None:
        raise RuntimeError(f"PAGED_ATTN_SDPA stands in for PyTorch's CPU kernel, and {reason}")
    kernel = Sdpa(_processor.family())
    library = torch.library.Library("aten", "IMPL", "CPU")
    with warnings.catch_warnings():
        # torch warns that a kernel is overridden, which is intended
        warnings.filterwarnings("ignore", "(?s).*verrid")
        library.impl(OP, kernel.__call__, "CPU", allow_override=True)
    return Handle(library)
