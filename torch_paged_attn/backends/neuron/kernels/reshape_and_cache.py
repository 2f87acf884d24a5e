"""Write keys or values into a cache: P tokens a step, all heads of a token together."""

from torch_paged_attn.backends.neuron.kernels.gather_scatter import P, scatter_rows
from torch_paged_attn.backends.neuron.kernels.groups import RowLayout
from torch_paged_attn.backends.neuron.toolchain import nisa, nl


def reshape_and_cache_kernel(rows, index, cache, num_kv_heads, layout):
    """Write rows (num_tokens, num_kv_heads * row.dim) into `cache` and return it.

    index: (num_tokens, 1) int32, -1 to skip. cache: its storage as (rows, row size). layout: the
    fields of a `RowLayout`, in a tuple, which torch.compile's launches can hold. num_tokens is a
    multiple of P, and no index comes twice.
    """
    row = RowLayout(layout[0], layout[1], layout[2], layout[3])
    for start in range(0, rows.shape[0], P):
        slots = nl.ndarray((P, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=slots, src=index[start : start + P])
        tile = nl.ndarray((P, num_kv_heads * row.dim), dtype=cache.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=rows[start : start + P])
        scatter_rows(cache, tile, slots, row, num_kv_heads)
    return cache
