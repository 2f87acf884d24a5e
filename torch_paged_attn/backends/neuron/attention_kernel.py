"""The engine kernel: flash attention over a work list (FlashAttention-2, arXiv 2307.08691, alg. 1).

One item is P query rows, on the partitions, against `tile_k` keys. All KV heads of an item are
loaded together, so that what a DMA reads is long: rows of queries and results hold every head, and
keys come in runs of `run` tokens wherever the cache keeps these side by side. Scores, the running
maximum and the sums are float32; probabilities are rounded to q's dtype for the second product.

A gather puts key `chunk * P * run + partition * run + t` on a partition; its column of the scores
is `chunk * P * run + t * P + partition`. Masks are selects: no NaN of a key that nobody sees is
ever multiplied.

NKI's parser and its tracer must both take this source: no `is`, no operators on tiles, loops are
`range` (unrolled) or `nl.fori_loop`.
"""

from torch_paged_attn.backends.neuron.tile_kernel import (
    FLOOR,
    MASKED,
    P,
    add_bias,
    add_unseen,
    clear_unseen,
    compute_scores,
    outside,
    update_softmax,
    weigh_values,
    widened,
)
from torch_paged_attn.backends.neuron.toolchain import nisa, nl

# below every sum of a row that sees a key, and within what `log` takes
TINY = 1.0e-18

# rows of `row_scalars`: what each row of queries has to itself
SINK, SLOPE, SCORE_SCALE, VALUE_SCALE = 0, 1, 2, 3
NUM_SCALARS = 4

# columns of `bounds`; with a bias, whether nobody sees a chunk's key follows for each chunk
START, STOP, POSITION, FIRST, KEY_START, KEY_STOP = 0, 1, 2, 3, 4, 5

# columns of `indices`; the chunks' keys follow, then their values, then the row of the bias
QUERY, RESULT, KEYS = 0, 1, 2


def float_type(name):
    """NKI's type of that name."""
    if name == "bfloat16":
        return nl.bfloat16
    if name == "float16":
        return nl.float16
    return nl.float32


def load_item(table, item, is_dynamic):
    """Row `item` of a (num_items, P, columns) table; `item` is a register in a dynamic loop."""
    columns = table.shape[2]
    tile = nl.ndarray((P, columns), dtype=table.dtype, buffer=nl.sbuf)
    if is_dynamic:
        row = table.ap(pattern=[[columns, P], [1, columns]], scalar_offset=item, indirect_dim=0)
        nisa.dma_copy(dst=tile, src=row)
    else:
        nisa.dma_copy(dst=tile, src=table[item])
    return tile


def gather_keys(dst, cache, index, column, heads, first_head, dim, layout):
    """Fill dst (P, chunks, heads, run, dim); layout is (token stride, head stride, offset)."""
    chunks, run = dst.shape[1], dst.shape[3]
    for chunk in range(chunks):
        rows = cache.ap(
            pattern=[[cache.shape[1], P], [layout[1], heads], [layout[0], run], [1, dim]],
            offset=layout[2] + first_head * layout[1],
            vector_offset=index[:, column + chunk : column + chunk + 1],
            indirect_dim=0,
        )
        nisa.dma_copy(dst=dst[:, chunk], src=rows, dge_mode=nisa.dge_mode.swdge)


def attention_kernel(
    q,
    k,
    v,
    indices,
    bounds,
    row_scalars,
    bias,
    num_kv_heads,
    k_layout,
    v_layout,
    chunks,
    run,
    scale,
    softcap,
    has_sinks,
    has_alibi,
    has_scales,
    has_bias,
    bias_head_stride,
    out_type,
    is_dynamic,
):
    """Attention of every row, (num_rows + P, num_kv_heads * head_dim_v), and its lse.

    q: (num_rows, num_kv_heads * head_dim). k, v: their storage as (rows, row size); key `t` of the
    run at row i and head h lies at `i * row size + offset + h * head stride + t * token stride`.
    indices: (num_items, P, columns) int32: row to load, row to store, rows of k, of v, of bias.
    bounds: (num_items, P, columns) float32. bias: (rows, tile_k) float32 in the order of keys, for
    which run is 1. row_scalars: (num_rows, NUM_SCALARS * num_kv_heads) float32. k and v may have 8
    bits. scale is divided by softcap if there is one; if has_scales each row has its own.

    What an item has not finished is stored past num_rows. A row that sees no key has an lse below
    FLOOR / 2.
    """
    num_rows, num_items = q.shape[0], indices.shape[0]
    head_dim = q.shape[1] // num_kv_heads
    heads = num_kv_heads // nl.num_programs(0)
    first_head = nl.program_id(0) * heads
    head_dim_v = v_layout[3]
    tile_k = chunks * run * P
    has_eight_bits = k.dtype != q.dtype
    out = nl.ndarray(
        (num_rows + P, num_kv_heads * head_dim_v), dtype=float_type(out_type), buffer=nl.shared_hbm
    )
    lse = nl.ndarray((num_rows + P, num_kv_heads), dtype=nl.float32, buffer=nl.shared_hbm)

    identity = nl.shared_identity_matrix(P, dtype=q.dtype)
    key_of_column = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=key_of_column, pattern=[[P * run, chunks], [1, run], [run, P]])
    widest = max(head_dim, head_dim_v)
    key_of_partition = nl.ndarray((P, chunks * run, widest), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(
        dst=key_of_partition,
        pattern=[[P * run, chunks], [1, run], [0, widest]],
        channel_multiplier=run,
    )

    maxima = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
    sums = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
    acc = nl.ndarray((P, heads, head_dim_v), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=maxima, value=FLOOR)
    nisa.memset(dst=sums, value=0.0)
    nisa.memset(dst=acc, value=0.0)

    def body(item):
        index = load_item(indices, item, is_dynamic)
        bound = load_item(bounds, item, is_dynamic)
        query_rows = index[:, QUERY : QUERY + 1]
        q_tile = nl.ndarray((P, heads, head_dim), dtype=q.dtype, buffer=nl.sbuf)
        q_rows = q.ap(
            pattern=[[num_kv_heads * head_dim, P], [1, heads * head_dim]],
            offset=first_head * head_dim,
            vector_offset=query_rows,
            indirect_dim=0,
        )
        nisa.dma_copy(dst=q_tile, src=q_rows, dge_mode=nisa.dge_mode.swdge)
        k_tile = nl.ndarray((P, chunks, heads, run, head_dim), dtype=k.dtype, buffer=nl.sbuf)
        v_tile = nl.ndarray((P, chunks, heads, run, head_dim_v), dtype=v.dtype, buffer=nl.sbuf)
        gather_keys(k_tile, k, index, KEYS, heads, first_head, head_dim, k_layout)
        gather_keys(v_tile, v, index, KEYS + chunks, heads, first_head, head_dim_v, v_layout)

        masked = nl.ndarray((P, tile_k), dtype=nl.uint8, buffer=nl.sbuf)
        outside(masked, key_of_column, bound, START, STOP)
        unseen = nl.ndarray((P, chunks * run, widest), dtype=nl.uint8, buffer=nl.sbuf)
        outside(unseen, key_of_partition, bound, KEY_START, KEY_STOP)
        if has_bias:
            add_unseen(unseen, key_of_partition, bound)
        # 0 * key + first: as wide as what it selects
        is_first = nl.ndarray((P, widest), dtype=nl.uint8, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=is_first,
            data=key_of_partition[:, 0, :],
            op0=nl.multiply,
            operand0=0.0,
            op1=nl.add,
            operand1=bound[:, FIRST : FIRST + 1],
        )

        scalars = nl.ndarray((P, NUM_SCALARS, heads), dtype=nl.float32, buffer=nl.sbuf)
        if has_sinks or has_alibi or has_scales:
            scalar_rows = row_scalars.ap(
                pattern=[
                    [NUM_SCALARS * num_kv_heads, P],
                    [num_kv_heads, NUM_SCALARS],
                    [1, heads],
                ],
                offset=first_head,
                vector_offset=query_rows,
                indirect_dim=0,
            )
            nisa.dma_copy(dst=scalars, src=scalar_rows, dge_mode=nisa.dge_mode.swdge)
        distance = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.sbuf)
        if has_alibi:
            # -abs(position - key) = min(x, -x)
            nisa.tensor_scalar(
                dst=distance,
                data=key_of_column,
                op0=nl.subtract,
                operand0=bound[:, POSITION : POSITION + 1],
            )
            nisa.scalar_tensor_tensor(
                dst=distance,
                data=distance,
                op0=nl.multiply,
                operand0=-1.0,
                op1=nl.minimum,
                operand1=distance,
            )

        for head in range(heads):
            m_i, l_i = maxima[:, head : head + 1], sums[:, head : head + 1]
            acc_head = acc[:, head, :]
            # a new query tile starts here: select, for what the last one left may be NaN
            nisa.tensor_copy_predicated(dst=m_i, src=FLOOR, predicate=is_first[:, 0:1])
            nisa.tensor_copy_predicated(dst=l_i, src=0.0, predicate=is_first[:, 0:1])
            nisa.tensor_copy_predicated(dst=acc_head, src=0.0, predicate=is_first[:, 0:head_dim_v])
            keys, values, at = k_tile, v_tile, head
            if has_eight_bits:
                keys, values, at = widened(k_tile, head, q.dtype), widened(v_tile, head, q.dtype), 0
            if nisa.get_nc_version() == nisa.nc_version.gen2:
                clear_unseen(keys, at, unseen)  # a product transposes: 0 * NaN would spread
            clear_unseen(values, at, unseen)
            factor = scale
            if has_scales:
                factor = scalars[:, SCORE_SCALE, head : head + 1]

            scores = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.sbuf)
            compute_scores(scores, q_tile[:, head], keys, at, identity, factor, softcap)
            if has_alibi:
                nisa.scalar_tensor_tensor(
                    dst=scores,
                    data=distance,
                    op0=nl.multiply,
                    operand0=scalars[:, SLOPE, head : head + 1],
                    op1=nl.add,
                    operand1=scores,
                )
            if has_bias:
                bias_rows = index[:, KEYS + 2 * chunks : KEYS + 2 * chunks + 1]
                add_bias(scores, bias, bias_rows, (first_head + head) * bias_head_stride)
            nisa.tensor_copy_predicated(dst=scores, src=MASKED, predicate=masked)
            p = nl.ndarray((P, tile_k), dtype=q.dtype, buffer=nl.sbuf)
            acc_scale = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
            update_softmax(p, m_i, l_i, acc_scale, scores)
            product = nl.ndarray((P, head_dim_v), dtype=nl.float32, buffer=nl.psum)
            weigh_values(product, p, values, at, identity)
            nisa.scalar_tensor_tensor(
                dst=acc_head,
                data=acc_head,
                op0=nl.multiply,
                operand0=acc_scale,
                op1=nl.add,
                operand1=product,
            )

        total = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
        top = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
        weight = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
        if has_sinks:
            # one more key without a value, folded in last
            sink = scalars[:, SINK, :]
            nisa.tensor_tensor(dst=top, data1=maxima, data2=sink, op=nl.maximum)
            nisa.tensor_tensor(dst=total, data1=maxima, data2=top, op=nl.subtract)
            nisa.activation(dst=weight, op=nl.exp, data=total)
            nisa.tensor_tensor(dst=total, data1=sink, data2=top, op=nl.subtract)
            nisa.activation(dst=total, op=nl.exp, data=total)
            tail = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=tail, data1=sums, data2=weight, op=nl.multiply)
            nisa.tensor_tensor(dst=total, data1=total, data2=tail, op=nl.add)
        else:
            nisa.tensor_copy(dst=top, src=maxima)
            nisa.tensor_copy(dst=total, src=sums)
            nisa.memset(dst=weight, value=1.0)
        nisa.tensor_scalar(dst=total, data=total, op0=nl.maximum, operand0=TINY)
        lse_tile = nl.ndarray((P, heads), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=lse_tile, op=nl.log, data=total)
        nisa.tensor_tensor(dst=lse_tile, data1=lse_tile, data2=top, op=nl.add)
        nisa.reciprocal(dst=total, data=total)
        nisa.tensor_tensor(dst=weight, data1=weight, data2=total, op=nl.multiply)
        if has_scales:
            nisa.tensor_tensor(
                dst=weight, data1=weight, data2=scalars[:, VALUE_SCALE, :], op=nl.multiply
            )
        out_tile = nl.ndarray((P, heads, head_dim_v), dtype=out.dtype, buffer=nl.sbuf)
        for head in range(heads):
            nisa.activation(
                dst=out_tile[:, head, :],
                op=nl.copy,
                data=acc[:, head, :],
                scale=weight[:, head : head + 1],
            )
        result_rows = index[:, RESULT : RESULT + 1]
        out_rows = out.ap(
            pattern=[[num_kv_heads * head_dim_v, P], [1, heads * head_dim_v]],
            offset=first_head * head_dim_v,
            vector_offset=result_rows,
            indirect_dim=0,
        )
        lse_rows = lse.ap(
            pattern=[[num_kv_heads, P], [1, heads]],
            offset=first_head,
            vector_offset=result_rows,
            indirect_dim=0,
        )
        nisa.dma_copy(dst=out_rows, src=out_tile, dge_mode=nisa.dge_mode.swdge)
        nisa.dma_copy(dst=lse_rows, src=lse_tile, dge_mode=nisa.dge_mode.swdge)

    if is_dynamic:
        nl.fori_loop(0, num_items, body)
    else:
        for item in range(num_items):
            body(item)
    return out, lse
