"""The engine kernel: flash attention over a work list (FlashAttention-2, arXiv 2307.08691, alg. 1).

One item is a stack of `depth` tiles of P query rows, on the partitions, against `tile_k` keys. All
KV heads of an item are loaded together, so that what a DMA reads is long: rows of queries and
results hold every head, and keys come in runs of `run` tokens wherever the cache keeps these side
by side. Queries are loaded with the first item of a stack and results stored with the last: for
the others the index says -1, which a DMA skips. Scores, the running maximum and the sums are
float32; probabilities are rounded to q's dtype for the second product.

Masks are selects: no NaN of a key that nobody sees is ever multiplied.

NKI's parser and its tracer must both take this source: no `is`, no operators on tiles, loops are
`range` (unrolled) or `nl.fori_loop`.
"""

from torch_paged_attn.backends.neuron.dropout_kernel import (
    NUM_WORDS,
    constant,
    dropped,
    multiplier,
)
from torch_paged_attn.backends.neuron.rows_kernel import P, load_rows, store_rows
from torch_paged_attn.backends.neuron.tile_kernel import (
    FLOOR,
    add_alibi,
    add_bias,
    clear_unseen,
    compute_scores,
    mask_and_reduce,
    outside,
    spread,
    turn_keys,
    update_softmax,
    weigh_values,
)
from torch_paged_attn.backends.neuron.toolchain import nisa, nl
from torch_paged_attn.backends.neuron.widen_kernel import widened

# below every sum of a row that sees a key, and within what `log` takes
TINY = 1.0e-18

# what each row of queries has to itself, for each head
SINK, SLOPE, SCORE_SCALE, VALUE_SCALE = 0, 1, 2, 3
NUM_SCALARS = 4


def load_item(table, first, item, is_dynamic):
    """Row `first + item` of a (num_items, P, columns) table; a dynamic item is a register."""
    columns = table.shape[2]
    tile = nl.ndarray((P, columns), dtype=table.dtype, buffer=nl.sbuf)
    if is_dynamic:
        row = table.ap(
            pattern=[[columns, P], [1, columns]],
            offset=first * P * columns,
            scalar_offset=item,
            indirect_dim=0,
        )
        nisa.dma_copy(dst=tile, src=row)
    else:
        nisa.dma_copy(dst=tile, src=table[first + item])
    return tile


def load_positions(table, first, item, is_dynamic):
    """Row `first + item` of a (num_items, tile_k) table, on every partition."""
    tile_k = table.shape[1]
    tile = nl.ndarray((P, tile_k), dtype=table.dtype, buffer=nl.sbuf)
    pattern = [[0, P], [1, tile_k]]
    if is_dynamic:
        row = table.ap(pattern=pattern, offset=first * tile_k, scalar_offset=item, indirect_dim=0)
        nisa.dma_copy(dst=tile, src=row)
    else:
        nisa.dma_copy(dst=tile, src=table.ap(pattern=pattern, offset=(first + item) * tile_k))
    return tile


def gather_keys(tile, cache, index, column, first_head, layout):
    """Fill tile (P, chunks, heads, run, dim); layout: (token stride, head stride, offset, dim)."""
    chunks, heads, run = tile.shape[1], tile.shape[2], tile.shape[3]
    from_head = (layout[0], layout[1], layout[2] + first_head * layout[1], layout[3])
    for chunk in range(chunks):
        rows = index[:, column + chunk : column + chunk + 1]
        load_rows(tile[:, chunk], cache, rows, from_head, heads, run, nisa.oob_mode.error)


def finish(out_tile, lse_tile, acc, maxima, sums, scalars, has_sinks, has_scales, keep_scale):
    """Results of one tile: out (P, heads, dim_v) and lse (P, heads) from what has been summed."""
    heads = acc.shape[1]
    total = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
    top = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
    weight = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
    if has_sinks:
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
        nisa.tensor_scalar(dst=weight, data=weight, op0=nl.multiply, operand0=keep_scale)
    else:
        nisa.tensor_copy(dst=top, src=maxima)
        nisa.tensor_copy(dst=total, src=sums)
        nisa.memset(dst=weight, value=keep_scale)
    nisa.tensor_scalar(dst=total, data=total, op0=nl.maximum, operand0=TINY)
    nisa.activation(dst=lse_tile, op=nl.log, data=total)
    nisa.tensor_tensor(dst=lse_tile, data1=lse_tile, data2=top, op=nl.add)
    nisa.reciprocal(dst=total, data=total)
    nisa.tensor_tensor(dst=weight, data1=weight, data2=total, op=nl.multiply)
    if has_scales:
        nisa.tensor_tensor(
            dst=weight, data1=weight, data2=scalars[:, :, VALUE_SCALE], op=nl.multiply
        )
    for head in range(heads):
        nisa.activation(
            dst=out_tile[:, head, :],
            op=nl.copy,
            data=acc[:, head, :],
            scale=weight[:, head : head + 1],
        )


def attention_kernel(
    out,
    lse,
    q,
    k,
    v,
    indices,
    bounds,
    count,
    positions,
    draws,
    words,
    row_scalars,
    bias,
    bias_rows,
    num_kv_heads,
    group_size,
    splits_heads,
    k_layout,
    v_layout,
    stored,
    depth,
    chunks,
    run,
    scale,
    softcap,
    keep_scale,
    has_sinks,
    has_alibi,
    has_scales,
    has_bias,
    has_dropout,
    bias_head_stride,
    is_dynamic,
):
    """Write the attention of the listed rows to out (num_rows, num_kv_heads * head_dim_v) and lse.

    q: (num_rows, num_kv_heads * head_dim). k, v: their storage as (rows, row size); key `t` of the
    run at row i and head h lies at `i * row size + offset + h * head stride + t * token stride`,
    stored as q's dtype (stored = "") or in bytes. The two programs of a logical core share the
    heads (splits_heads) or the items.

    indices (num_items, P, 2 depth + 2 chunks) int32: rows to load, rows to store, rows of k, rows
    of v; -1 is skipped. bounds (num_items, P, 3 depth + 3 + tile_k / P) float32: columns of keys
    that rows see, from and to, positions of rows; whether the stack begins; columns that any row
    sees, from and to; whether the bias hides a column from all. count (1, 1) int32: how many of its
    items each program runs, the same number for both, since what cores do that loop differently is
    undefined. positions (num_items, tile_k) int32, of the columns. draws (num_items, P,
    2 depth) int32: row within the sequence, sequence << 16 | head of the group; words (1,
    NUM_WORDS) int32: Philox's keys, offset, threshold. row_scalars (num_rows, num_kv_heads *
    NUM_SCALARS) float32. bias (rows, tile_k) float32, bias_rows (num_items, P, depth) int32.

    scale is divided by softcap if there is one; if has_scales each row has its own. A row that sees
    no key has an lse below FLOOR / 2.
    """
    programs, program = nl.num_programs(0), nl.program_id(0)
    head_dim, head_dim_v = k_layout[3], v_layout[3]
    heads, first_head = num_kv_heads, 0
    num_items, first_item = indices.shape[0], 0
    if splits_heads:
        heads = num_kv_heads // programs
        first_head = program * heads
    else:
        num_items = indices.shape[0] // programs
        first_item = program * num_items
    tile_k = chunks * run * P
    start_at, stop_at, position_at = 0, depth, 2 * depth
    first_at, key_start_at, absent_at = 3 * depth, 3 * depth + 1, 3 * depth + 3
    result_at, keys_at = depth, 2 * depth

    identity = nl.shared_identity_matrix(P, dtype=q.dtype)
    key_of_column = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=key_of_column, pattern=[[1, tile_k]])
    key_of_partition = nl.ndarray((P, chunks * run), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=key_of_partition, pattern=[[P * run, chunks], [1, run]], channel_multiplier=run)

    # what a stack keeps from item to item
    q_tile = nl.ndarray((P, depth, heads, head_dim), dtype=q.dtype, buffer=nl.sbuf)
    maxima = nl.ndarray((P, depth * heads), dtype=nl.float32, buffer=nl.sbuf)
    sums = nl.ndarray((P, depth * heads), dtype=nl.float32, buffer=nl.sbuf)
    acc = nl.ndarray((P, depth, heads, head_dim_v), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=q_tile, value=0.0)
    nisa.memset(dst=maxima, value=FLOOR)
    nisa.memset(dst=sums, value=0.0)
    nisa.memset(dst=acc, value=0.0)
    scalars = nl.ndarray((P, depth, heads, NUM_SCALARS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=scalars, value=0.0)
    factors = (0, 0)
    word_tile = nl.ndarray((P, NUM_WORDS), dtype=nl.int32, buffer=nl.sbuf)
    if has_dropout:
        factors = (multiplier(0, (P, tile_k // 4)), multiplier(1, (P, tile_k // 4)))
        nisa.dma_copy(dst=word_tile, src=words.ap(pattern=[[0, P], [1, NUM_WORDS]]))

    def body(item):
        index = load_item(indices, first_item, item, is_dynamic)
        bound = load_item(bounds, first_item, item, is_dynamic)
        for level in range(depth):
            rows = index[:, level : level + 1]
            part = (0, 0, first_head * head_dim, heads * head_dim)
            load_rows(q_tile[:, level], q, rows, part, 1, 1, nisa.oob_mode.skip)
            if has_sinks or has_alibi or has_scales:
                part = (0, 0, first_head * NUM_SCALARS, heads * NUM_SCALARS)
                load_rows(scalars[:, level], row_scalars, rows, part, 1, 1, nisa.oob_mode.skip)
        k_tile = nl.ndarray((P, chunks, heads, run, head_dim), dtype=k.dtype, buffer=nl.sbuf)
        v_tile = nl.ndarray((P, chunks, heads, run, head_dim_v), dtype=v.dtype, buffer=nl.sbuf)
        gather_keys(k_tile, k, index, keys_at, first_head, k_layout)
        gather_keys(v_tile, v, index, keys_at + chunks, first_head, v_layout)

        unseen = nl.ndarray((P, chunks * run), dtype=nl.uint8, buffer=nl.sbuf)
        outside(unseen, key_of_partition, bound, key_start_at, key_start_at + 1)
        if has_bias:
            nisa.tensor_tensor(
                dst=unseen,
                data1=unseen,
                data2=bound[:, absent_at : absent_at + chunks * run],
                op=nl.logical_or,
            )
        # a new stack starts here: select, for what the last one left may be NaN
        is_first = nl.ndarray((P, 1), dtype=nl.uint8, buffer=nl.sbuf)
        nisa.tensor_copy(dst=is_first, src=bound[:, first_at : first_at + 1])
        state = spread(is_first, 0, depth * heads)
        nisa.tensor_copy_predicated(dst=maxima, src=FLOOR, predicate=state)
        nisa.tensor_copy_predicated(dst=sums, src=0.0, predicate=state)
        width = depth * heads * head_dim_v
        nisa.tensor_copy_predicated(
            dst=acc.reshape((P, width)), src=0.0, predicate=spread(is_first, 0, width)
        )

        key_position = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.sbuf)
        quad = nl.ndarray((P, tile_k // 4), dtype=nl.uint32, buffer=nl.sbuf)
        draw = nl.ndarray((P, 2 * depth), dtype=nl.int32, buffer=nl.sbuf)
        if has_alibi or has_dropout:
            key_tile = load_positions(positions, first_item, item, is_dynamic)
            nisa.tensor_copy(dst=key_position, src=key_tile)
            nisa.tensor_scalar(
                dst=quad,
                data=key_tile.view(nl.uint32)[:, 0:tile_k:4],
                op0=nl.right_shift,
                operand0=2,
            )
        if has_dropout:
            draw = load_item(draws, first_item, item, is_dynamic)
        if has_bias:
            bias_index = load_item(bias_rows, first_item, item, is_dynamic)

        for head in range(heads):
            keys, values, at = k_tile, v_tile, head
            if stored != "":
                keys = widened(k_tile, head, q.dtype, stored)
                values = widened(v_tile, head, q.dtype, stored)
                at = 0
            if nisa.get_nc_version() == nisa.nc_version.gen2:
                clear_unseen(keys, at, unseen)  # a product transposes: 0 * NaN would spread
            clear_unseen(values, at, unseen)
            k_turned = turn_keys(keys, at, identity)
            for level in range(depth):
                factor = scale
                if has_scales:
                    factor = scalars[:, level, head, SCORE_SCALE : SCORE_SCALE + 1]
                scores = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.sbuf)
                q_head = q_tile[:, level, head]
                compute_scores(scores, q_head, k_turned, identity, factor, softcap)
                if has_alibi:
                    place = position_at + level
                    slope = scalars[:, level, head, SLOPE : SLOPE + 1]
                    add_alibi(scores, key_position, bound[:, place : place + 1], slope)
                if has_bias:
                    offset = (first_head + head) * bias_head_stride
                    add_bias(scores, bias, bias_index[:, level : level + 1], offset)
                row_max = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
                mask_and_reduce(
                    scores, row_max, key_of_column, bound, start_at + level, stop_at + level
                )
                p = nl.ndarray((P, tile_k), dtype=q.dtype, buffer=nl.sbuf)
                acc_scale = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
                cell = level * heads + head
                m_i, l_i = maxima[:, cell : cell + 1], sums[:, cell : cell + 1]
                update_softmax(p, m_i, l_i, acc_scale, scores, row_max)
                if has_dropout:
                    query_head = nl.ndarray((P, 1), dtype=nl.uint32, buffer=nl.sbuf)
                    nisa.tensor_tensor(
                        dst=query_head,
                        data1=draw.view(nl.uint32)[:, depth + level : depth + level + 1],
                        data2=constant((P, 1), (first_head + head) * group_size),
                        op=nl.add,
                    )
                    predicate = dropped(
                        word_tile.view(nl.uint32),
                        quad,
                        draw.view(nl.uint32),
                        level,
                        query_head,
                        factors,
                    )
                    nisa.tensor_copy_predicated(dst=p, src=0.0, predicate=predicate)
                weigh_values(acc[:, level, head, :], acc_scale, p, values, at, identity)

        for level in range(depth):
            cells = level * heads
            out_tile = nl.ndarray((P, heads, head_dim_v), dtype=out.dtype, buffer=nl.sbuf)
            lse_tile = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
            finish(
                out_tile,
                lse_tile,
                acc[:, level],
                maxima[:, cells : cells + heads],
                sums[:, cells : cells + heads],
                scalars[:, level],
                has_sinks,
                has_scales,
                keep_scale,
            )
            result = index[:, result_at + level : result_at + level + 1]
            part = (0, 0, first_head * head_dim_v, heads * head_dim_v)
            store_rows(out, out_tile, result, part, 1)
            store_rows(lse, lse_tile, result, (0, 0, first_head, heads), 1)

    if is_dynamic:
        count_tile = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=count_tile, src=count)
        stop = nisa.register_alloc()
        nisa.register_load(stop, count_tile)
        nl.fori_loop(0, stop, body)
    else:
        for item in range(num_items):
            body(item)
    return out, lse
