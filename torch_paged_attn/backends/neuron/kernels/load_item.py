"""Loading an item: its tables, the queries of a stack that begins, its keys and values."""

from torch_paged_attn.backends.neuron.kernels.gather_scatter import P, gather_rows
from torch_paged_attn.backends.neuron.kernels.groups import Item, RowLayout
from torch_paged_attn.backends.neuron.kernels.query_tile import BANK, outside
from torch_paged_attn.backends.neuron.toolchain import nisa, nl

# the numbers that a row of queries has to itself, for each head
SINK, SLOPE, SCORE_SCALE, VALUE_SCALE = 0, 1, 2, 3
NUM_SCALARS = 4


def load_part(table, number, pattern, size, offset, program):
    """What a pattern names of an item of a table, from `offset` on, as many rows and columns. Items
    are `size` numbers apart; that of a dynamic item is in a register.
    """
    tile = nl.ndarray((pattern[0][1], pattern[1][1]), dtype=table.dtype, buffer=nl.sbuf)
    first = program.first_item * size + offset
    if program.options.is_dynamic:
        part = table.ap(pattern=pattern, offset=first, scalar_offset=number, indirect_dim=0)
    else:
        part = table.ap(pattern=pattern, offset=first + number * size)
    nisa.dma_copy(dst=tile, src=part)
    return tile


def load_table(table, number, program):
    """An item of a (num_items, P, columns) table."""
    columns = table.shape[2]
    return load_part(table, number, [[columns, P], [1, columns]], P * columns, 0, program)


def load_token_scales(kind, head, number, tensors, program):
    """Scales by token of one head's keys (kind 0) or values (1), (P, tile_k) float32: they are read
    once, and brought to every partition by products with 1, which are exact in float32.
    """
    tile_k, size = tensors.positions.shape[1], tensors.token_scales.shape[1]
    offset = (kind * program.options.num_kv_heads + program.first_head + head) * tile_k
    pattern = [[tile_k, 1], [1, tile_k]]
    row = load_part(tensors.token_scales, number, pattern, size, offset, program)
    scales = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.sbuf)
    for first in range(0, tile_k, BANK):
        columns = row[:, first : min(first + BANK, tile_k)]
        product = nl.ndarray((P, columns.shape[1]), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=product,
            stationary=program.ones,
            moving=columns,
            is_stationary_onezero=True,
            accumulate=False,
        )
        nisa.tensor_copy(dst=scales[:, first : first + columns.shape[1]], src=product)
    return scales


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


def load_item(number, tensors, program):
    """Load an item: its tables, its keys and values, and what is computed of them alone."""
    options, columns = program.options, program.columns
    index = load_table(tensors.indices, number, program)
    bound = load_table(tensors.bounds, number, program)
    k = load_kv(tensors.k, index, columns.k, options.k_row, options.share, program)
    v = load_kv(tensors.v, index, columns.v, options.v_row, 1, program)

    unseen, unseen_k = None, None
    if not options.sees_all_keys:
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
    tile_k = tensors.positions.shape[1]
    pattern = [[0, P], [1, tile_k]]  # the same on every partition
    whole = load_part(tensors.positions, number, pattern, tile_k, 0, program)
    position = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=position, src=whole)
    quad = nl.ndarray((P, tile_k // 4), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=quad, data=whole.view(nl.uint32)[:, 0:tile_k:4], op0=nl.right_shift, operand0=2
    )
    return position, quad
