"""Writing rows into a cache: P tokens a step, all heads of a token together."""

from torch_paged_attn.backends.neuron.rows_kernel import P, store_rows
from torch_paged_attn.backends.neuron.toolchain import nisa, nl


def scatter_kernel(rows, index, cache, num_kv_heads, layout):
    """Write rows (num_tokens, num_kv_heads * dim) into `cache` and return it.

    index: (num_tokens, 1) int32, -1 to skip. cache: its storage as (rows, row size). layout: (slot
    stride, head stride, offset, dim). num_tokens is a multiple of P, no index comes twice.
    """
    dim = layout[3]
    for start in range(0, rows.shape[0], P):
        slots = nl.ndarray((P, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=slots, src=index[start : start + P])
        tile = nl.ndarray((P, num_kv_heads * dim), dtype=cache.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=rows[start : start + P])
        store_rows(cache, tile, slots, layout, num_kv_heads)
    return cache
