"""Rows of a tensor in HBM by index: one for each partition of a tile.

NKI's table of DMA modes has gathers and scatters from the third generation on. On the second every
row is a DMA of its own, whose start is a number in SBUF. An index of -1 is out of bounds: in mode
`skip` its row is neither read nor written.
"""

from torch_paged_attn.backends.neuron.kernels.groups import RowLayout
from torch_paged_attn.backends.neuron.toolchain import nisa, nl

P = 128


def parts_of(rows, index, layout, heads, run):
    """What `layout` describes of the rows at index (count, 1): (count, heads, run, dim) numbers; a
    stretch of a row is one head of one token.
    """
    count, offset = index.shape[0], layout.offset
    pattern = [
        [rows.shape[1], count],
        [layout.head_stride, heads],
        [layout.token_stride, run],
        [1, layout.dim],
    ]
    if count == 1:
        return rows.ap(pattern=pattern, offset=offset, scalar_offset=index, indirect_dim=0)
    return rows.ap(pattern=pattern, offset=offset, vector_offset=index, indirect_dim=0)


def gather_rows(tile, rows, index, layout, heads, run, mode):
    """tile[p] = the part of rows[index[p]] that `layout` describes; index is (P, 1) int32."""
    if nisa.get_nc_version() == nisa.nc_version.gen2:
        for p in range(P):
            row = parts_of(rows, index[p : p + 1, 0:1], layout, heads, run)
            nisa.dma_copy(dst=tile[p : p + 1], src=row, oob_mode=mode)
    else:
        gathered = parts_of(rows, index, layout, heads, run)
        nisa.dma_copy(dst=tile, src=gathered, oob_mode=mode, dge_mode=nisa.dge_mode.swdge)


def scatter_rows(rows, tile, index, layout, heads):
    """The part of rows[index[p]] that `layout` describes = tile[p]; no index comes twice."""
    skip = nisa.oob_mode.skip
    if nisa.get_nc_version() == nisa.nc_version.gen2:
        for p in range(P):
            row = parts_of(rows, index[p : p + 1, 0:1], layout, heads, 1)
            nisa.dma_copy(dst=row, src=tile[p : p + 1], oob_mode=skip)
    else:
        scattered = parts_of(rows, index, layout, heads, 1)
        nisa.dma_copy(dst=scattered, src=tile, oob_mode=skip, dge_mode=nisa.dge_mode.swdge)


def reshape_and_cache_kernel(rows, index, cache, num_kv_heads, layout):
    """Write keys or values, rows (num_tokens, num_kv_heads * row.dim), into `cache` and return it:
    P tokens a step, all heads of a token together.

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
