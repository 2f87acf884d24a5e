"""The steps of flash attention on one tile of P query rows and `tile_k` keys, all on the chip."""

from torch_paged_attn.backends.neuron.toolchain import nisa, nl

P = 128

# a score no row sees, and what a maximum starts at: exp(MASKED - FLOOR) is 0
MASKED = -3.0e38
FLOOR = -1.0e30

# the lowest float32: what is less is -inf
LOWEST = -3.4028234663852886e38

# columns of `bounds` before those of the bias
NUM_BOUNDS = 6


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


def widened(tile, head, dtype):
    """One head of gathered keys in the type of products, (P, chunks, 1, run, dim)."""
    chunks, run, dim = tile.shape[1], tile.shape[3], tile.shape[4]
    wide = nl.ndarray((P, chunks, 1, run, dim), dtype=dtype, buffer=nl.sbuf)
    for chunk in range(chunks):
        nisa.tensor_copy(dst=wide[:, chunk, 0], src=tile[:, chunk, head])
    return wide


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


def compute_scores(scores, q, k, k_head, identity, scale, softcap):
    """scores (P, tile_k) = cap(q @ k^T); q (P, dim), k as gathered, scale divided by softcap."""
    dim = q.shape[1]
    chunks, run = k.shape[1], k.shape[3]
    tile_k = chunks * run * P
    product = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.psum)
    for start in range(0, dim, P):
        stop = min(dim, start + P)
        q_turned = nl.ndarray((stop - start, P), dtype=q.dtype, buffer=nl.sbuf)
        transpose(q_turned, q[:, start:stop], identity)
        k_turned = nl.ndarray((stop - start, tile_k), dtype=k.dtype, buffer=nl.sbuf)
        for chunk in range(chunks):
            for t in range(run):
                column = (chunk * run + t) * P
                transpose(
                    k_turned[:, column : column + P], k[:, chunk, k_head, t, start:stop], identity
                )
        nisa.nc_matmul(dst=product, stationary=q_turned, moving=k_turned, accumulate=start > 0)
    if softcap > 0.0:
        nisa.activation(dst=scores, op=nl.tanh, data=product, scale=scale)
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
