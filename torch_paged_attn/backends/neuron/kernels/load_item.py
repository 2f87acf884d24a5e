"""Loading an item: its tables, the queries of a stack that begins, its keys and values."""

from torch_paged_attn.backends.neuron.kernels.gather_scatter import P, gather_rows
from torch_paged_attn.backends.neuron.kernels.groups import Item, RowLayout
from torch_paged_attn.backends.neuron.kernels.query_tile import outside
from torch_paged_attn.backends.neuron.toolchain import nisa, nl

# the numbers that a row of queries has to itself, for each head
SINK, SLOPE, SCORE_SCALE, VALUE_SCALE = 0, 1, 2, 3
NUM_SCALARS = 4


def load_table_row(table, item, program):
    """A program's row `item` of a (num_items, P, columns) table; a dynamic item is a register."""
    columns = table.shape[2]
    tile = nl.ndarray((P, columns), dtype=table.dtype, buffer=nl.sbuf)
    if program.options.is_dynamic:
        row = table.ap(
            pattern=[[columns, P], [1, columns]],
            offset=program.first_item * P * columns,
            scalar_offset=item,
            indirect_dim=0,
        )
        nisa.dma_copy(dst=tile, src=row)
    else:
        nisa.dma_copy(dst=tile, src=table[program.first_item + item])
    return tile


def load_positions(positions, item, program):
    """A program's row `item` of the (num_items, tile_k) positions, on every partition."""
    tile_k, first = positions.shape[1], program.first_item
    tile = nl.ndarray((P, tile_k), dtype=positions.dtype, buffer=nl.sbuf)
    pattern = [[0, P], [1, tile_k]]
    if program.options.is_dynamic:
        row = positions.ap(
            pattern=pattern, offset=first * tile_k, scalar_offset=item, indirect_dim=0
        )
        nisa.dma_copy(dst=tile, src=row)
    else:
        nisa.dma_copy(dst=tile, src=positions.ap(pattern=pattern, offset=(first + item) * tile_k))
    return tile


def load_token_scales(kind, head, item, tensors, program):
    """Scales by token of one head's keys (kind 0) or values (1), (P, tile_k) float32."""
    heads, tile_k = program.options.num_kv_heads, tensors.positions.shape[1]
    columns = 2 * heads * tile_k
    offset = (kind * heads + program.first_head + head) * tile_k
    tile = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.sbuf)
    pattern = [[0, P], [1, tile_k]]
    if program.options.is_dynamic:
        row = tensors.token_scales.ap(
            pattern=pattern,
            offset=program.first_item * columns + offset,
            scalar_offset=item,
            indirect_dim=0,
        )
    else:
        first = (program.first_item + item) * columns
        row = tensors.token_scales.ap(pattern=pattern, offset=first + offset)
    nisa.dma_copy(dst=tile, src=row)
    return tile


def load_queries(stack, index, tensors, program):
    """Load the queries of a stack that begins, and the numbers its rows have to themselves."""
    options, heads, first = program.options, program.heads, program.first_head
    dim = options.k_row.dim
    for level in range(options.depth):
        rows = index[:, program.columns.load + level : program.columns.load + level + 1]
        part = RowLayout(0, 0, first * dim, heads * dim)
        gather_rows(stack.q[:, level], tensors.q, rows, part, 1, 1, nisa.oob_mode.skip)
        if options.has_sinks or options.has_alibi or options.has_scales:
            part = RowLayout(0, 0, first * NUM_SCALARS, heads * NUM_SCALARS)
            tile = stack.scalars[:, level]
            gather_rows(tile, tensors.row_scalars, rows, part, 1, 1, nisa.oob_mode.skip)


def load_kv(cache, index, column, layout, share, program):
    """The program's heads of an item's keys, or values: (P, chunks, heads, run, dim).

    Where `share` heads divide the partitions, their runs are as many times as long, and lie in
    (P, chunks, heads / share, share * run, dim).
    """
    options, heads, run = program.options, program.heads // share, program.options.run * share
    tile = nl.ndarray(
        (P, options.chunks, heads, run, layout.dim), dtype=cache.dtype, buffer=nl.sbuf
    )
    offset = layout.offset + program.first_head * layout.head_stride
    from_head = RowLayout(layout.token_stride, layout.head_stride * share, offset, layout.dim)
    for chunk in range(options.chunks):
        rows = index[:, column + chunk : column + chunk + 1]
        gather_rows(tile[:, chunk], cache, rows, from_head, heads, run, nisa.oob_mode.error)
    return tile


def load_item(number, stack, tensors, program):
    """Load an item, and the queries of the stack if it is the stack's first."""
    options, columns = program.options, program.columns
    index = load_table_row(tensors.indices, number, program)
    bound = load_table_row(tensors.bounds, number, program)
    load_queries(stack, index, tensors, program)
    k = load_kv(tensors.k, index, columns.k, options.k_row, options.share, program)
    v = load_kv(tensors.v, index, columns.v, options.v_row, 1, program)

    unseen = unseen_keys(bound, program)
    unseen_k = unseen
    if options.share > 1 and nisa.get_nc_version() == nisa.nc_version.gen2:
        unseen_k = nl.ndarray(program.key_of_share.shape, dtype=nl.uint8, buffer=nl.sbuf)
        outside(unseen_k, program.key_of_share, bound, columns.key_start, columns.key_stop)
    position, quad = None, None
    if options.has_alibi or options.has_dropout:
        position, quad = key_positions(number, tensors, program)
    return Item(index, bound, k, v, unseen, unseen_k, position, quad)


def unseen_keys(bound, program):
    """Which of the gathered keys no row sees, (P, chunks * run)."""
    options, columns = program.options, program.columns
    width = options.chunks * options.run
    unseen = nl.ndarray((P, width), dtype=nl.uint8, buffer=nl.sbuf)
    outside(unseen, program.key_of_partition, bound, columns.key_start, columns.key_stop)
    if options.has_bias:
        absent = bound[:, columns.absent : columns.absent + width]
        nisa.tensor_tensor(dst=unseen, data1=unseen, data2=absent, op=nl.logical_or)
    return unseen


def key_positions(number, tensors, program):
    """Of the item's columns, (P, tile_k) float32, and of every fourth / 4, for dropout."""
    whole = load_positions(tensors.positions, number, program)
    tile_k = whole.shape[1]
    position = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=position, src=whole)
    quad = nl.ndarray((P, tile_k // 4), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=quad, data=whole.view(nl.uint32)[:, 0:tile_k:4], op0=nl.right_shift, operand0=2
    )
    return position, quad
