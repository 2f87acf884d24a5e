"""The backward's steps on one tile of P query rows and `width` keys, all on the chip.

Queries lie on the partitions, as in the forward. Sums over queries (dk, dv) then take a tile of
probabilities as it is; only the gradient of scores is transposed, for the sum over keys (dq).
"""

from torch_paged_attn.backends.neuron.kernels.backward_groups import (
    COLUMNS,
    DLSE,
    HIDES_FIRST,
    HIDES_LAST,
    LEVEL,
    MINUS_LSE,
    SLOPE,
)
from torch_paged_attn.backends.neuron.kernels.gather_scatter import P, scatter_rows
from torch_paged_attn.backends.neuron.kernels.groups import RowLayout
from torch_paged_attn.backends.neuron.kernels.philox import draw
from torch_paged_attn.backends.neuron.kernels.query_tile import (
    add_alibi,
    add_bias,
    contract,
    outside,
    scale_scores,
)
from torch_paged_attn.backends.neuron.toolchain import nisa, nl


def float_tile(width):
    """A tile of float32 in SBUF."""
    return nl.ndarray((P, width), dtype=nl.float32, buffer=nl.sbuf)


# tiles of queries that go together: a product moves at most 512 columns, and a bank holds as many
TOGETHER = 4


def deltas(stack):
    """dout . out - dlse of every row of a stack, (P, depth): what its scores' gradients lack."""
    depth, dim = stack.dout.shape[1], stack.dout.shape[2]
    delta = float_tile(depth)
    for first in range(0, depth, TOGETHER):
        last = min(first + TOGETHER, depth)
        products = nl.ndarray((P, last - first, dim), dtype=nl.float32, buffer=nl.sbuf)
        dout, out = stack.dout[:, first:last], stack.out[:, first:last]
        nisa.tensor_tensor(dst=products, data1=dout, data2=out, op=nl.multiply)
        nisa.tensor_reduce(dst=delta[:, first:last], op=nl.add, data=products, axis=2)
    dlse = stack.scalars[:, :, DLSE]
    nisa.tensor_tensor(dst=delta, data1=delta, data2=dlse, op=nl.subtract)
    return delta


def shape_scores(product, level, part, width, stack, item, tensors, program):
    """Scores (P, width) as the forward's, not masked, and the softcap's slope at each."""
    options, columns = program.options, program.columns
    first = part * options.backward.width
    scores, slope = float_tile(width), float_tile(width)
    scale_scores(scores, product, options.scale, options.softcap)
    if options.softcap > 0.0:
        # 1 - tanh(x)^2
        nisa.activation(dst=slope, op=nl.square, data=scores, scale=1.0 / options.softcap)
        nisa.tensor_scalar(
            dst=slope, data=slope, op0=nl.multiply, operand0=-1.0, op1=nl.add, operand1=1.0
        )
    if options.has_alibi:
        place = columns.position + level
        position = item.bound[:, place : place + 1]
        keys = item.position[:, first : first + width]
        add_alibi(scores, keys, position, stack.scalars[:, level, SLOPE : SLOPE + 1])
    if options.has_bias:
        rows = item.index[:, columns.bias + level : columns.bias + level + 1]
        add_bias(scores, tensors.bias, rows, first)
    return scores, slope


def hidden(dst, keys, bounds, tile, columns):
    """dst = which of these keys are hidden from each row of a tile that hides some."""
    start, stop = columns.start + tile[LEVEL], columns.stop + tile[LEVEL]
    if tile[HIDES_FIRST] and tile[HIDES_LAST]:
        outside(dst, keys, bounds, start, stop)
    elif tile[HIDES_FIRST]:
        nisa.tensor_scalar(dst=dst, data=keys, op0=nl.less, operand0=bounds[:, start : start + 1])
    else:
        nisa.tensor_scalar(
            dst=dst, data=keys, op0=nl.greater_equal, operand0=bounds[:, stop : stop + 1]
        )


def recompute(tile, part, transposed, stack, item, tensors, program):
    """Probabilities (P, width) in float32, 0 where masked, and the softcap's slope."""
    options, columns = program.options, program.columns
    level, width = tile[LEVEL], tile[COLUMNS]
    hides = tile[HIDES_FIRST] or tile[HIDES_LAST]
    first = part * options.backward.width
    product = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.psum)
    contract(
        product,
        transposed.q[:, :, level],
        transposed.k[:, :, first : first + width],
        options.k_row.dim,
    )
    scores, factor, slope = product, options.scale, product
    if options.backward.is_shaped:
        scores, slope = shape_scores(product, level, part, width, stack, item, tensors, program)
        factor = 1.0
    minus_lse = stack.scalars[:, level, MINUS_LSE : MINUS_LSE + 1]
    start, stop = columns.start + level, columns.stop + level
    p = float_tile(width)
    if nisa.get_nc_version() == nisa.nc_version.gen2 or not hides:
        nisa.activation(dst=p, op=nl.exp, data=scores, scale=factor, bias=minus_lse)
        if hides:
            masked = nl.ndarray((P, width), dtype=nl.uint8, buffer=nl.sbuf)
            keys = program.key_of_column[:, first : first + width]
            hidden(masked, keys, item.bound, tile, columns)
            nisa.tensor_copy_predicated(dst=p, src=0.0, predicate=masked)
    else:
        nisa.range_select(
            dst=p,
            on_true_tile=scores,
            comp_op0=nl.greater_equal,
            comp_op1=nl.less,
            bound0=item.bound[:, start : start + 1],
            bound1=item.bound[:, stop : stop + 1],
            range_start=first,
        )
        nisa.activation(dst=p, op=nl.exp, data=p, scale=factor, bias=minus_lse)
    return p, slope


def gradient_of_scores(level, part, width, p, transposed, stack, item, program):
    """What dv sums, (P, width) in the type of products, and dS in PSUM's or SBUF's float32.

    Returns the rounded probabilities, which dropout has thinned out, and the gradient of each
    probability, before the row's delta is taken off.
    """
    options, columns = program.options, program.columns
    first = part * options.backward.width
    dp = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.psum)
    values = transposed.v[:, :, first : first + width]
    contract(dp, transposed.dout[:, :, level], values, options.v_row.dim)
    rounded = nl.ndarray((P, width), dtype=stack.q.dtype, buffer=nl.sbuf)
    nisa.activation(dst=rounded, op=nl.copy, data=p)
    if options.has_dropout:
        row = columns.token + level, columns.head + level
        quad = item.quad[:, first // 4 : (first + width) // 4]
        dropped = draw(quad, item.index.view(nl.uint32), row, 0, program.philox)
        nisa.tensor_copy_predicated(dst=rounded, src=0.0, predicate=dropped)
        kept = float_tile(width)
        nisa.tensor_scalar(dst=kept, data=dp, op0=nl.multiply, operand0=options.keep_scale)
        nisa.tensor_copy_predicated(dst=kept, src=0.0, predicate=dropped)
        return rounded, kept
    return rounded, dp


def differentiate(tile, part, transposed, stack, item, tensors, program):
    """The tiles (P, width) that the sums take, in q's type: probabilities, and gradients of q.k
    before its scale. The gradient of the bias is stored on the way.
    """
    options, columns, backward = program.options, program.columns, program.options.backward
    level, width = tile[LEVEL], tile[COLUMNS]
    p, slope = recompute(tile, part, transposed, stack, item, tensors, program)
    rounded, dp = gradient_of_scores(level, part, width, p, transposed, stack, item, program)
    delta = transposed.delta[:, level : level + 1]
    dx = nl.ndarray((P, width), dtype=stack.q.dtype, buffer=nl.sbuf)
    ds = dx
    if options.softcap > 0.0 or backward.wants_dbias:
        ds = float_tile(width)
    # (dp - delta) * p
    nisa.scalar_tensor_tensor(
        dst=ds, data=dp, op0=nl.subtract, operand0=delta, op1=nl.multiply, operand1=p
    )
    if backward.wants_dbias:
        rows = item.index[:, columns.dbias + level : columns.dbias + level + 1]
        scatter_rows(tensors.dbias, ds, rows, RowLayout(0, 0, part * backward.width, width), 1)
    if options.softcap > 0.0:
        nisa.tensor_tensor(dst=dx, data1=ds, data2=slope, op=nl.multiply)
    elif backward.wants_dbias:
        nisa.tensor_copy(dst=dx, src=ds)
    return rounded, dx
