"""Writing rows into a cache: P tokens a step, all heads of a token together."""

from torch_paged_attn.backends.neuron.toolchain import nisa, nl

P = 128


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
        places = cache.ap(
            pattern=[[cache.shape[1], P], [layout[1], num_kv_heads], [1, dim]],
            offset=layout[2],
            vector_offset=slots,
            indirect_dim=0,
        )
        nisa.dma_copy(
            dst=places, src=tile, oob_mode=nisa.oob_mode.skip, dge_mode=nisa.dge_mode.swdge
        )
    return cache
