"""The attention kernel: flash attention over a work list (FlashAttention-2, arXiv 2307.08691).

An item is a stack of `depth` tiles of P query rows, on the partitions, against `tile_k` keys. The
KV heads of an item are loaded together, so that DMAs are long: a row of queries or results holds
every head, and keys come in runs of `run` tokens where the cache has them side by side, or of
`share` times as many where so many heads divide a gather's partitions. Queries are
loaded with the first item of a stack, results are stored with the last; the index of every other
item is -1, which a DMA skips. Scores, the running maximum and the sums are float32; probabilities
are rounded to q's dtype for the second product.

Masks are selects: a NaN in a key that no row sees is never multiplied.
"""

from torch_paged_attn.backends.neuron.kernels.dequant import dequantize_head
from torch_paged_attn.backends.neuron.kernels.gather_scatter import P, scatter_rows
from torch_paged_attn.backends.neuron.kernels.groups import RowLayout, Stack, Tensors, table_columns
from torch_paged_attn.backends.neuron.kernels.load_item import (
    NUM_SCALARS,
    SCORE_SCALE,
    SINK,
    SLOPE,
    VALUE_SCALE,
    load_item,
    load_queries,
    load_token_scales,
)
from torch_paged_attn.backends.neuron.kernels.philox import draw
from torch_paged_attn.backends.neuron.kernels.program import loaded_count, start_program
from torch_paged_attn.backends.neuron.kernels.query_tile import (
    FLOOR,
    TINY,
    add_alibi,
    add_bias,
    clear_unseen,
    compute_scores,
    filled,
    mask_and_reduce,
    new_probabilities,
    spread,
    transpose_keys,
    transposes_by_dma,
    turn_tiles,
    update_softmax,
    weigh_values,
)
from torch_paged_attn.backends.neuron.toolchain import nisa, nl


def begin_stack(stack, is_first):
    """Forget the last stack's state where `is_first` (P, 1) is 1: select, for it may hold NaN."""
    begins = nl.ndarray((P, 1), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_copy(dst=begins, src=is_first)
    cells = stack.maxima.shape[1]
    nisa.tensor_copy_predicated(dst=stack.maxima, src=FLOOR, predicate=spread(begins, 0, cells))
    nisa.tensor_copy_predicated(dst=stack.sums, src=0.0, predicate=spread(begins, 0, cells))
    width = cells * stack.acc.shape[3]
    nisa.tensor_copy_predicated(
        dst=stack.acc.reshape((P, width)), src=0.0, predicate=spread(begins, 0, width)
    )


def score_tile(level, head, transposed, token_scales, stack, item, tensors, program):
    """Scores (P, tile_k) of one query tile and head, with ALiBi and bias; not masked yet."""
    options, columns = program.options, program.columns
    scores = nl.ndarray(program.key_of_column.shape, dtype=nl.float32, buffer=nl.sbuf)
    factor = options.scale
    if options.has_scales:
        factor = stack.scalars[:, level, head, SCORE_SCALE : SCORE_SCALE + 1]
    q = stack.q[:, level, head : head + 1]
    softcap, has_token_scales = options.softcap, options.has_token_scales
    compute_scores(
        scores, q, transposed, program.identity, factor, softcap, has_token_scales, token_scales
    )
    if options.has_alibi:
        place = columns.position + level
        slope = stack.scalars[:, level, head, SLOPE : SLOPE + 1]
        add_alibi(scores, item.position, item.bound[:, place : place + 1], slope)
    if options.has_bias:
        rows = item.index[:, columns.bias + level : columns.bias + level + 1]
        offset = (program.first_head + head) * options.bias_head_stride
        add_bias(scores, tensors.bias, rows, offset)
    return scores


def turn_keys(head, dtype, item, program):
    """The keys of `head` and of those that share its gather, (P, dim / P, share, tile_k)."""
    options = program.options
    keys, at = item.k, head // options.share
    if options.kv_dtype != "":
        keys = dequantize_head(keys, at, dtype, options.kv_dtype)
        at = 0
    if nisa.get_nc_version() == nisa.nc_version.gen2:
        clear_unseen(keys, at, item.unseen_k)  # a product transposes: 0 * NaN would spread
    return transpose_keys(keys, at, options.share, program.identity)


def attend_head(number, head, transposed, stack, item, tensors, program):
    """Fold an item's keys, transposed, and values of one head into the state of each tile."""
    options, columns = program.options, program.columns
    values, at = item.v, head
    if options.kv_dtype != "":
        values = dequantize_head(values, head, stack.q.dtype, options.kv_dtype)
        at = 0
    clear_unseen(values, at, item.unseen)
    of_keys, of_values = None, None
    if options.has_token_scales:
        of_keys = load_token_scales(0, head, number, tensors, program)
        of_values = load_token_scales(1, head, number, tensors, program)
    by_dma = transposes_by_dma(stack.q.dtype, options)
    for level in range(options.depth):
        scores = score_tile(level, head, transposed, of_keys, stack, item, tensors, program)
        row_max = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
        start, stop = columns.start + level, columns.stop + level
        mask_and_reduce(scores, row_max, program.key_of_column, item.bound, start, stop)
        p, in_order = new_probabilities(values, stack.q.dtype)
        acc_scale = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
        cell = level * program.heads + head
        m_i, l_i = stack.maxima[:, cell : cell + 1], stack.sums[:, cell : cell + 1]
        if options.has_token_scales:
            # rounded once, after the product
            update_softmax(scores, m_i, l_i, acc_scale, scores, row_max)
            nisa.tensor_tensor(dst=in_order, data1=scores, data2=of_values, op=nl.multiply)
        else:
            update_softmax(in_order, m_i, l_i, acc_scale, scores, row_max)
        if options.has_dropout:
            first_of_group = (program.first_head + head) * options.group_size
            row, index = (columns.token + level, columns.head + level), item.index.view(nl.uint32)
            dropped = draw(item.quad, index, row, first_of_group, program.philox)
            nisa.tensor_copy_predicated(dst=in_order, src=0.0, predicate=dropped)
        turned_p = nl.ndarray(p.shape, dtype=p.dtype, buffer=nl.sbuf)
        turn_tiles(turned_p, p, program.identity, by_dma)
        weigh_values(stack.acc[:, level, head, :], acc_scale, turned_p, values, at)


def finish(out_tile, lse_tile, level, stack, options):
    """The results of one tile: out (P, heads, dim_v) and lse (P, heads)."""
    heads = stack.acc.shape[2]
    cells = level * heads
    maxima, sums = stack.maxima[:, cells : cells + heads], stack.sums[:, cells : cells + heads]
    scalars = stack.scalars[:, level]
    total = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
    top = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
    weight = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
    if options.has_sinks:
        # one more key without a value, folded in last
        sink = scalars[:, :, SINK]
        nisa.tensor_tensor(dst=top, data1=maxima, data2=sink, op=nl.maximum)
        nisa.tensor_tensor(dst=total, data1=maxima, data2=top, op=nl.subtract)
        nisa.activation(dst=weight, op=nl.exp, data=total)
        nisa.tensor_tensor(dst=total, data1=sink, data2=top, op=nl.subtract)
        nisa.activation(dst=total, op=nl.exp, data=total)
        tail = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=tail, data1=sums, data2=weight, op=nl.multiply)
        nisa.tensor_tensor(dst=total, data1=total, data2=tail, op=nl.add)
        nisa.tensor_scalar(dst=weight, data=weight, op0=nl.multiply, operand0=options.keep_scale)
    else:
        nisa.tensor_copy(dst=top, src=maxima)
        nisa.tensor_copy(dst=total, src=sums)
        nisa.memset(dst=weight, value=options.keep_scale)
    nisa.tensor_scalar(dst=total, data=total, op0=nl.maximum, operand0=TINY)
    nisa.activation(dst=lse_tile, op=nl.log, data=total)
    nisa.tensor_tensor(dst=lse_tile, data1=lse_tile, data2=top, op=nl.add)
    nisa.reciprocal(dst=total, data=total)
    nisa.tensor_tensor(dst=weight, data1=weight, data2=total, op=nl.multiply)
    if options.has_scales:
        nisa.tensor_tensor(
            dst=weight, data1=weight, data2=scalars[:, :, VALUE_SCALE], op=nl.multiply
        )
    for head in range(heads):
        nisa.activation(
            dst=out_tile[:, head, :],
            op=nl.copy,
            data=stack.acc[:, level, head, :],
            scale=weight[:, head : head + 1],
        )


def store_results(level, stack, index, tensors, program):
    """Store one tile's rows where `index` names any: with the last item of a stack."""
    heads, first, dim_v = program.heads, program.first_head, program.options.v_row.dim
    out_tile = nl.ndarray((P, heads, dim_v), dtype=tensors.out.dtype, buffer=nl.sbuf)
    lse_tile = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
    finish(out_tile, lse_tile, level, stack, program.options)
    rows = index[:, program.columns.store + level : program.columns.store + level + 1]
    scatter_rows(tensors.out, out_tile, rows, RowLayout(0, 0, first * dim_v, heads * dim_v), 1)
    scatter_rows(tensors.lse, lse_tile, rows, RowLayout(0, 0, first, heads), 1)


def attend_item(number, stack, tensors, program):
    """Everything that is done for one item."""
    item = load_item(number, tensors, program)
    load_queries(stack, item.index, tensors, program)
    is_first = program.columns.is_first
    begin_stack(stack, item.bound[:, is_first : is_first + 1])
    share = program.options.share
    for first in range(0, program.heads, share):
        transposed = turn_keys(first, stack.q.dtype, item, program)
        for head in range(first, first + share):
            of_head = transposed[:, :, head - first]
            attend_head(number, head, of_head, stack, item, tensors, program)
    for level in range(program.options.depth):
        store_results(level, stack, item.index, tensors, program)


def new_stack(dtype, program):
    """A stack that has seen no key."""
    depth, heads = program.options.depth, program.heads
    head_dim, head_dim_v = program.options.k_row.dim, program.options.v_row.dim
    return Stack(
        q=filled((P, depth, heads, head_dim), dtype, 0.0),
        scalars=filled((P, depth, heads, NUM_SCALARS), nl.float32, 0.0),
        maxima=filled((P, depth * heads), nl.float32, FLOOR),
        sums=filled((P, depth * heads), nl.float32, 0.0),
        acc=filled((P, depth, heads, head_dim_v), nl.float32, 0.0),
    )


def attention_kernel(
    out, lse, q, k, v, indices, bounds, positions, count, words, row_scalars, bias, token_scales,
    options,
):  # fmt: skip
    """Write the attention of the listed rows to out (num_rows, num_kv_heads * head_dim_v) and lse.

    Front ends look for tensors among a kernel's own parameters only, so these are not grouped.

    q: (num_rows, num_kv_heads * head_dim). k, v: their storage as (rows, row size), each row as
    `options.k_row` and `v_row` say, in q's dtype or in bytes. indices (num_items, P, columns)
    int32 and bounds (num_items, P, columns) float32: see `TableColumns`; an index of -1 is skipped.
    positions (num_items, tile_k) int32, of the columns. count (1, 1) int32: how many of its items
    each program runs, the same number for both, since NKI leaves it undefined when cores do that
    loop differently. words (1, NUM_WORDS) int32: Philox's keys, offset, threshold. row_scalars
    (num_rows, num_kv_heads * NUM_SCALARS) float32. bias (rows, tile_k) float32. token_scales
    (num_items, 2 * num_kv_heads * tile_k) float32: of keys, then of values.

    A row that sees no key has an lse of FLOOR.
    """
    columns, tile_k = table_columns(options, 0), options.chunks * options.run * P
    program = start_program(q.dtype, indices.shape[0], words, options, columns, tile_k)
    stack = new_stack(q.dtype, program)
    tensors = Tensors(
        out, lse, q, k, v, indices, bounds, positions, row_scalars, bias, token_scales
    )

    def body(number):
        attend_item(number, stack, tensors, program)

    if options.is_dynamic:
        nl.fori_loop(0, loaded_count(count), body)
    else:
        for number in range(program.num_items):
            body(number)
    return out, lse
