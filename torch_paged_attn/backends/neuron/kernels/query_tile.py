"""The steps of flash attention on one tile of P query rows and `tile_k` keys, all on the chip.

Columns of scores follow the order of keys. A gather leaves key `chunk * P * run + partition * run
+ t` on each partition, `run` neighbours side by side; transposing puts them in order again. (Keys
may lie as `share` heads one below the other, each on P / share partitions.)
"""

from torch_paged_attn.backends.neuron.kernels.gather_scatter import P, gather_rows
from torch_paged_attn.backends.neuron.kernels.groups import RowLayout
from torch_paged_attn.backends.neuron.toolchain import nisa, nl

# The three lowest float32: the score of a masked key, as `range_select` writes it; the first value
# of a maximum; and the lowest score of a key that a row sees. They are 2e31 apart, so that
# exp(MASKED - FLOOR), exp(FLOOR - LOWEST) and exp(MASKED - LOWEST) are 0.
MASKED = -3.4028234663852886e38
FLOOR = MASKED + 2.0**104
LOWEST = FLOOR + 2.0**104
# below every sum of a row that sees a key, and within what `log` takes
TINY = 1.0e-18

BANK = 512  # float32 in a bank of PSUM, which a product stays within
TURNED = 4  # tiles of P columns that are transposed into one bank


def filled(shape, dtype, value):
    """A tile in SBUF of one number."""
    tile = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=value)
    return tile


def spread(tile, column, width):
    """One column of a whole (P, n) tile, repeated `width` times."""
    pattern = [[tile.shape[1], tile.shape[0]], [0, width]]
    return tile.ap(pattern=pattern, offset=column, dtype=tile.dtype)


def transposed_tile(shape, dtype):
    """PSUM for transposed values; the second generation transposes by products, in float32."""
    if nisa.get_nc_version() == nisa.nc_version.gen2:
        return nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def transpose(dst, src, identity):
    """dst (F, P) in PSUM = src (P, F) transposed."""
    if nisa.get_nc_version() == nisa.nc_version.gen2:
        # a product with 1, exact in float32
        nisa.nc_matmul(
            dst=dst, stationary=src, moving=identity, is_moving_onezero=True, accumulate=False
        )
    else:
        nisa.nc_transpose(dst=dst, data=src, engine=nisa.engine.tensor)


def clear_unseen(tile, head, unseen):
    """Zero the keys of tile (P, chunks, heads, run, dim) that no row sees: they may hold NaN."""
    chunks, run, dim = tile.shape[1], tile.shape[3], tile.shape[4]
    predicate = unseen.ap(pattern=[[chunks * run, P], [run, chunks], [1, run], [0, dim]])
    nisa.tensor_copy_predicated(dst=tile[:, :, head], src=0.0, predicate=predicate)


def outside(dst, values, bounds, start, stop):
    """dst = values < bounds[start] or values >= bounds[stop], for each partition."""
    below = nl.ndarray(values.shape, dtype=nl.float32, buffer=nl.sbuf)
    first, last = bounds[:, start : start + 1], bounds[:, stop : stop + 1]
    nisa.tensor_scalar(dst=below, data=values, op0=nl.less, operand0=first)
    nisa.scalar_tensor_tensor(
        dst=dst, data=values, op0=nl.greater_equal, operand0=last, op1=nl.logical_or, operand1=below
    )


def transpose_keys(keys, head, share, identity):
    """Keys (P, chunks, heads, run, dim) as (P, dim / P, share, tile_k): dim on the partitions, of
    which each of `share` heads had a part.
    """
    chunks, run, dim = keys.shape[1], keys.shape[3], keys.shape[4]
    part = P // share
    steps, tile_k = (dim + P - 1) // P, chunks * part * run
    transposed = nl.ndarray((P, steps, share, tile_k), dtype=keys.dtype, buffer=nl.sbuf)
    for step in range(steps):
        start, stop = step * P, min(dim, step * P + P)
        for chunk in range(chunks):
            for first in range(0, run, TURNED):
                count = min(TURNED, run - first)
                tile = transposed_tile((stop - start, count, P), keys.dtype)
                for t in range(count):
                    transpose(tile[:, t, :], keys[:, chunk, head, first + t, start:stop], identity)
                for i in range(share):
                    in_order = tile.ap(
                        pattern=[[count * P, stop - start], [1, part], [P, count]], offset=i * part
                    )
                    column = (step * share + i) * tile_k + chunk * part * run + first
                    places = transposed.ap(
                        pattern=[[steps * share * tile_k, stop - start], [run, part], [1, count]],
                        offset=column,
                    )
                    nisa.tensor_copy(dst=places, src=in_order)
    return transposed


def contract(product, queries, keys, dim):
    """product (P, width) = queries (P, dim / P, P) over keys (P, dim / P, width), transposed."""
    for step in range(queries.shape[1]):
        size = min(dim - step * P, P)
        stationary, moving = queries[0:size, step, :], keys[0:size, step, :]
        nisa.nc_matmul(dst=product, stationary=stationary, moving=moving, accumulate=step > 0)


def compute_scores(scores, q, keys, identity, scale, softcap, has_token_scales, token_scales):
    """scores (P, tile_k) = cap(q @ k^T); q (P, 1, dim), keys transposed, scale divided by softcap.

    `token_scales` (P, tile_k), if there are some, multiply the columns first.
    """
    dim, tile_k = q.shape[2], keys.shape[2]
    q_turned = turn_rows(q, identity, False)
    for first in range(0, tile_k, BANK):
        last = min(first + BANK, tile_k)
        product = nl.ndarray((P, last - first), dtype=nl.float32, buffer=nl.psum)
        contract(product, q_turned[:, :, 0], keys[:, :, first:last], dim)
        if has_token_scales:
            scaled = nl.ndarray(product.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(
                dst=scaled, data1=product, data2=token_scales[:, first:last], op=nl.multiply
            )
            product = scaled
        scale_scores(scores[:, first:last], product, scale, softcap)


def scale_scores(scores, product, scale, softcap):
    """scores = cap(product * scale), `scale` divided by softcap if there is one."""
    if softcap > 0.0:
        nisa.activation(dst=scores, op=nl.tanh, data=product, scale=scale)
        nisa.tensor_scalar(dst=scores, data=scores, op0=nl.multiply, operand0=softcap)
    else:
        nisa.activation(dst=scores, op=nl.copy, data=product, scale=scale)


def add_alibi(scores, key_position, position, slope):
    """scores - slope * abs(key - position), for -abs(x) = min(x, -x)."""
    away = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=away, data=key_position, op0=nl.subtract, operand0=position)
    nisa.scalar_tensor_tensor(
        dst=away, data=away, op0=nl.multiply, operand0=-1.0, op1=nl.minimum, operand1=away
    )
    nisa.scalar_tensor_tensor(
        dst=scores, data=away, op0=nl.multiply, operand0=slope, op1=nl.add, operand1=scores
    )


def add_bias(scores, bias, index, offset):
    """scores (P, tile_k) plus rows of bias (rows, tile_k), LOWEST at least; -inf masks instead."""
    tile_k = scores.shape[1]
    tile = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.sbuf)
    row = RowLayout(0, 0, offset, tile_k)
    gather_rows(tile, bias, index, row, 1, 1, nisa.oob_mode.error)
    hidden = nl.ndarray((P, tile_k), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=hidden, data=tile, op0=nl.less, operand0=MASKED)
    nisa.scalar_tensor_tensor(
        dst=scores, data=tile, op0=nl.maximum, operand0=LOWEST, op1=nl.add, operand1=scores
    )
    nisa.tensor_copy_predicated(dst=scores, src=MASKED, predicate=hidden)


def mask_and_reduce(scores, row_max, key_of_column, bounds, start, stop):
    """Mask the columns outside each row's range, and take the maximum of what is left."""
    if nisa.get_nc_version() == nisa.nc_version.gen2:
        masked = nl.ndarray(scores.shape, dtype=nl.uint8, buffer=nl.sbuf)
        outside(masked, key_of_column, bounds, start, stop)
        nisa.tensor_copy_predicated(dst=scores, src=MASKED, predicate=masked)
        nisa.tensor_reduce(dst=row_max, op=nl.maximum, data=scores, axis=1)
    else:
        nisa.range_select(
            dst=scores,
            on_true_tile=scores,
            comp_op0=nl.greater_equal,
            comp_op1=nl.less,
            bound0=bounds[:, start : start + 1],
            bound1=bounds[:, stop : stop + 1],
            reduce_res=row_max,
        )


def update_softmax(p, m_i, l_i, acc_scale, scores, row_max):
    """Fold scores into the running maximum and sum (P, 1); p = exp(scores - maximum)."""
    row_sum = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    reset = nisa.reduce_cmd.reset_reduce
    nisa.tensor_tensor(dst=row_max, data1=row_max, data2=m_i, op=nl.maximum)
    if nisa.get_nc_version() == nisa.nc_version.gen4:
        nisa.exponential(dst=acc_scale, src=m_i, max_value=row_max)
        nisa.exponential(dst=p, src=scores, max_value=row_max, reduce_res=row_sum, reduce_cmd=reset)
    else:
        shift = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=shift, data=row_max, op0=nl.multiply, operand0=-1.0)
        nisa.activation(dst=acc_scale, op=nl.exp, data=m_i, bias=shift)
        nisa.activation(
            dst=p,
            op=nl.exp,
            data=scores,
            bias=shift,
            reduce_op=nl.add,
            reduce_res=row_sum,
            reduce_cmd=reset,
        )
    nisa.tensor_copy(dst=m_i, src=row_max)
    nisa.scalar_tensor_tensor(
        dst=l_i, data=l_i, op0=nl.multiply, operand0=acc_scale, op1=nl.add, operand1=row_sum
    )


def new_probabilities(keys, dtype):
    """Room for p (P, tiles, P), and a view of it whose columns follow the order of keys.

    Tile `chunk * run + t` holds the t-th key of each run of a chunk, as the gathered values lie.
    """
    chunks, run = keys.shape[1], keys.shape[3]
    p = nl.ndarray((P, chunks * run, P), dtype=dtype, buffer=nl.sbuf)
    pattern = [[chunks * run * P, P], [run * P, chunks], [1, P], [P, run]]
    return p, p.ap(pattern=pattern)


def transposes_by_dma(dtype, options):
    """Whether DMA transposes tiles: beside deep stacks, where TensorE, VectorE and ScalarE are what
    bounds, and the queues are idle (Trainium2's architecture guide, "DMA Transpose"). One tile of
    queries, as of a decode, is bound by DMA itself.
    """
    if nisa.get_nc_version() == nisa.nc_version.gen2 or dtype == nl.float32:
        return False
    return options.depth > 1


def turn_tiles(dst, src, identity, by_dma):
    """dst (F, tiles, P) = each tile of src (P, tiles, F) transposed, by DMA or on TensorE."""
    tiles = src.shape[1]
    if by_dma:
        nisa.dma_transpose(dst=dst, src=src, axes=(2, 1, 0))
    else:
        for first in range(0, tiles, TURNED):
            last = min(first + TURNED, tiles)
            part = transposed_tile((src.shape[2], last - first, src.shape[0]), src.dtype)
            for tile in range(first, last):
                transpose(part[:, tile - first, :], src[:, tile, :], identity)
            nisa.tensor_copy(dst=dst[:, first:last, :], src=part)


def turn_rows(rows, identity, by_dma):
    """Tiles of rows (P, tiles, dim) as (P, dim / P, tiles, P): dim on the partitions."""
    tiles, dim = rows.shape[1], rows.shape[2]
    steps = (dim + P - 1) // P
    transposed = nl.ndarray((P, steps, tiles, P), dtype=rows.dtype, buffer=nl.sbuf)
    for step in range(steps):
        start, stop = step * P, min(dim, step * P + P)
        turn_tiles(transposed[0 : stop - start, step], rows[:, :, start:stop], identity, by_dma)
    return transposed


def weigh_values(acc, acc_scale, transposed, v, head):
    """acc (P, dim_v) = acc * acc_scale + p @ v; p transposed, v (P, chunks, heads, run, dim_v)."""
    chunks, run = v.shape[1], v.shape[3]
    product = nl.ndarray(acc.shape, dtype=nl.float32, buffer=nl.psum)
    for chunk in range(chunks):
        for t in range(run):
            p, values = transposed[:, chunk * run + t, :], v[:, chunk, head, t, :]
            nisa.nc_matmul(dst=product, stationary=p, moving=values, accumulate=chunk + t > 0)
    nisa.scalar_tensor_tensor(
        dst=acc, data=acc, op0=nl.multiply, operand0=acc_scale, op1=nl.add, operand1=product
    )
