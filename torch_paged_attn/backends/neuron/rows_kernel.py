"""Rows of a tensor in HBM by index: one for each partition of a tile.

Gathers and scatters exist from the third generation on, says NKI's table of DMA modes. Before it
every row is a DMA of its own, which starts where a number in SBUF says. Where the mode is `skip`,
an index of -1 is out of bounds, and leaves what it would have written as it is.
"""

from torch_paged_attn.backends.neuron.toolchain import nisa

P = 128


def pattern_of(rows, count, layout, heads, run):
    """`count` rows of (heads, run, dim); layout is (token stride, head stride, offset, dim).

    A part of a row in one piece is `(0, 0, offset, width)`, one head of one token.
    """
    return [[rows.shape[1], count], [layout[1], heads], [layout[0], run], [1, layout[3]]]


def load_rows(tile, rows, index, layout, heads, run, mode):
    """tile[p] = what `layout` shows of rows[index[p]]; index is (P, 1) int32."""
    if nisa.get_nc_version() == nisa.nc_version.gen2:
        for p in range(P):
            row = rows.ap(
                pattern=pattern_of(rows, 1, layout, heads, run),
                offset=layout[2],
                scalar_offset=index[p : p + 1, 0:1],
                indirect_dim=0,
            )
            nisa.dma_copy(dst=tile[p : p + 1], src=row, oob_mode=mode)
    else:
        gathered = rows.ap(
            pattern=pattern_of(rows, P, layout, heads, run),
            offset=layout[2],
            vector_offset=index,
            indirect_dim=0,
        )
        nisa.dma_copy(dst=tile, src=gathered, oob_mode=mode, dge_mode=nisa.dge_mode.swdge)


def store_rows(rows, tile, index, layout, heads):
    """What `layout` shows of rows[index[p]] = tile[p]; no index comes twice."""
    if nisa.get_nc_version() == nisa.nc_version.gen2:
        for p in range(P):
            row = rows.ap(
                pattern=pattern_of(rows, 1, layout, heads, 1),
                offset=layout[2],
                scalar_offset=index[p : p + 1, 0:1],
                indirect_dim=0,
            )
            nisa.dma_copy(dst=row, src=tile[p : p + 1], oob_mode=nisa.oob_mode.skip)
    else:
        scattered = rows.ap(
            pattern=pattern_of(rows, P, layout, heads, 1),
            offset=layout[2],
            vector_offset=index,
            indirect_dim=0,
        )
        nisa.dma_copy(
            dst=scattered, src=tile, oob_mode=nisa.oob_mode.skip, dge_mode=nisa.dge_mode.swdge
        )
