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

from torch_paged_attn.backends.neuron.toolchain import nisa, nl

P = 128

# a score no row sees, and what a maximum starts at: exp(MASKED - FLOOR) is 0
MASKED = -3.0e38
FLOOR = -1.0e30

# below every sum of a row that sees a key, and within what `log` takes
TINY = 1.0e-18

# the lowest float32: what is less is -inf
LOWEST = -3.4028234663852886e38

# columns of `bounds`; with a bias, whether nobody sees a chunk's key follows for each chunk
START, STOP, POSITION, FIRST, KEY_START, KEY_STOP = 0, 1, 2, 3, 4, 5
NUM_BOUNDS = 6

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


def transpose(dst, src, identity):
    """dst (F, P) = src (P, F) transposed, through PSUM."""
    partitions, columns = src.shape
    if nisa.get_nc_version() == nisa.nc_version.gen2:
        # this generation transposes by a product with 1, exact in float32
        turned = nl.ndarray((columns, partitions), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=turned,
            stationary=src,
            moving=identity[0:partitions, 0:partitions],
            is_moving_onezero=True,
            accumulate=False,
        )
    else:
        turned = nl.ndarray((columns, partitions), dtype=src.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=src, engine=nisa.engine.tensor)
    nisa.tensor_copy(dst=dst, src=turned)


def clear_unseen(tile, head, unseen):
    """Zero the keys that no row of the item sees: their slots may hold NaN."""
    chunks, run, dim = tile.shape[1], tile.shape[3], tile.shape[4]
    for chunk in range(chunks):
        nisa.tensor_copy_predicated(
            dst=tile[:, chunk, head],
            src=0.0,
            predicate=unseen[:, chunk * run : chunk * run + run, 0:dim],
        )


def outside(dst, values, bounds, start, stop):
    """dst = values < bounds[start] or values >= bounds[stop], for each partition."""
    below = nl.ndarray(values.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=below, data=values, op0=nl.less, operand0=bounds[:, start : start + 1])
    nisa.scalar_tensor_tensor(
        dst=dst,
        data=values,
        op0=nl.greater_equal,
        operand0=bounds[:, stop : stop + 1],
        op1=nl.logical_or,
        operand1=below,
    )


def add_unseen(unseen, key_of_partition, bounds):
    """Keys that the bias hides from every row of the item: run is 1, one column a chunk."""
    absent = nl.ndarray(unseen.shape, dtype=nl.float32, buffer=nl.sbuf)
    for chunk in range(unseen.shape[1]):
        # 0 * key + flag: as wide as what it selects
        nisa.tensor_scalar(
            dst=absent[:, chunk, :],
            data=key_of_partition[:, chunk, :],
            op0=nl.multiply,
            operand0=0.0,
            op1=nl.add,
            operand1=bounds[:, NUM_BOUNDS + chunk : NUM_BOUNDS + chunk + 1],
        )
    nisa.tensor_tensor(dst=unseen, data1=unseen, data2=absent, op=nl.logical_or)


def add_bias(scores, bias, index, offset):
    """scores (P, tile_k) plus the rows of bias (rows, tile_k); -inf masks, and is never added."""
    tile_k = scores.shape[1]
    tile = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.sbuf)
    rows = bias.ap(
        pattern=[[tile_k, P], [1, tile_k]], offset=offset, vector_offset=index, indirect_dim=0
    )
    nisa.dma_copy(dst=tile, src=rows, dge_mode=nisa.dge_mode.swdge)
    hidden = nl.ndarray((P, tile_k), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=hidden, data=tile, op0=nl.less, operand0=LOWEST)
    nisa.tensor_tensor(dst=scores, data1=scores, data2=tile, op=nl.add)
    nisa.tensor_copy_predicated(dst=scores, src=MASKED, predicate=hidden)


def compute_scores(scores, q, k, head, identity, scale, softcap):
    """scores (P, tile_k) = cap(scale * q @ k^T); q (P, heads, dim), k as gathered."""
    dim = q.shape[2]
    chunks, run = k.shape[1], k.shape[3]
    tile_k = chunks * run * P
    product = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.psum)
    for start in range(0, dim, P):
        stop = min(dim, start + P)
        q_turned = nl.ndarray((stop - start, P), dtype=q.dtype, buffer=nl.sbuf)
        transpose(q_turned, q[:, head, start:stop], identity)
        k_turned = nl.ndarray((stop - start, tile_k), dtype=k.dtype, buffer=nl.sbuf)
        for chunk in range(chunks):
            for t in range(run):
                column = (chunk * run + t) * P
                transpose(
                    k_turned[:, column : column + P], k[:, chunk, head, t, start:stop], identity
                )
        nisa.nc_matmul(dst=product, stationary=q_turned, moving=k_turned, accumulate=start > 0)
    if softcap > 0.0:
        nisa.activation(dst=scores, op=nl.tanh, data=product, scale=scale / softcap)
        nisa.tensor_scalar(dst=scores, data=scores, op0=nl.multiply, operand0=softcap)
    else:
        nisa.activation(dst=scores, op=nl.copy, data=product, scale=scale)


def weigh_values(product, p, v, head, identity):
    """product (P, dim_v) in PSUM = p (P, tile_k) @ v (P, chunks, heads, run, dim_v)."""
    chunks, run = v.shape[1], v.shape[3]
    for chunk in range(chunks):
        for t in range(run):
            column = (chunk * run + t) * P
            p_turned = nl.ndarray((P, P), dtype=p.dtype, buffer=nl.sbuf)
            transpose(p_turned, p[:, column : column + P], identity)
            nisa.nc_matmul(
                dst=product,
                stationary=p_turned,
                moving=v[:, chunk, head, t, :],
                accumulate=column > 0,
            )


def update_softmax(p, m_i, l_i, acc_scale, scores):
    """Fold scores into the running maximum and sum (P, 1); p = exp(scores - maximum)."""
    tile_max = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=tile_max, op=nl.maximum, data=scores, axis=1)
    nisa.tensor_tensor(dst=tile_max, data1=tile_max, data2=m_i, op=nl.maximum)
    shift = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=shift, data=tile_max, op0=nl.multiply, operand0=-1.0)
    nisa.activation(dst=acc_scale, op=nl.exp, data=m_i, bias=shift)
    nisa.tensor_copy(dst=m_i, src=tile_max)
    row_sum = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=p,
        op=nl.exp,
        data=scores,
        bias=shift,
        reduce_op=nl.add,
        reduce_res=row_sum,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    nisa.scalar_tensor_tensor(
        dst=l_i, data=l_i, op0=nl.multiply, operand0=acc_scale, op1=nl.add, operand1=row_sum
    )


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
    has_bias,
    bias_head_stride,
    out_type,
    is_dynamic,
):
    """Attention of every row, (num_rows + P, num_kv_heads * head_dim_v), and its lse.

    q: (num_rows, num_kv_heads * head_dim). k, v: their storage as (rows, row size); key `t` of the
    run at row i and head h lies at `i * row size + offset + h * head stride + t * token stride`.
    indices: (num_items, P, columns) int32: row to load, row to store, rows of k, of v, of bias.
    bounds: (num_items, P, columns) float32. row_scalars: (num_rows, 2 * num_kv_heads) float32,
    sinks then slopes. bias: (rows, tile_k) float32 in the order of keys, for which run is 1.

    What an item has not finished is stored past num_rows. A row that sees no key has an lse below
    FLOOR / 2.
    """
    num_rows, num_items = q.shape[0], indices.shape[0]
    head_dim = q.shape[1] // num_kv_heads
    heads = num_kv_heads // nl.num_programs(0)
    first_head = nl.program_id(0) * heads
    head_dim_v = v_layout[3]
    tile_k = chunks * run * P
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

        scalars = nl.ndarray((P, 2, heads), dtype=nl.float32, buffer=nl.sbuf)
        if has_sinks or has_alibi:
            scalar_rows = row_scalars.ap(
                pattern=[[2 * num_kv_heads, P], [num_kv_heads, 2], [1, heads]],
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
            if nisa.get_nc_version() == nisa.nc_version.gen2:
                clear_unseen(k_tile, head, unseen)  # a product transposes: 0 * NaN would spread
            clear_unseen(v_tile, head, unseen)

            scores = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.sbuf)
            compute_scores(scores, q_tile, k_tile, head, identity, scale, softcap)
            if has_alibi:
                nisa.scalar_tensor_tensor(
                    dst=scores,
                    data=distance,
                    op0=nl.multiply,
                    operand0=scalars[:, 1, head : head + 1],
                    op1=nl.add,
                    operand1=scores,
                )
            if has_bias:
                bias_rows = index[:, KEYS + 2 * chunks : KEYS + 2 * chunks + 1]
                add_bias(scores, bias, bias_rows, (first_head + head) * bias_head_stride)
            nisa.tensor_copy_predicated(dst=scores, src=MASKED, predicate=masked)
            p = nl.ndarray((P, tile_k), dtype=v.dtype, buffer=nl.sbuf)
            acc_scale = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
            update_softmax(p, m_i, l_i, acc_scale, scores)
            product = nl.ndarray((P, head_dim_v), dtype=nl.float32, buffer=nl.psum)
            weigh_values(product, p, v_tile, head, identity)
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
            sink = scalars[:, 0, :]
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
