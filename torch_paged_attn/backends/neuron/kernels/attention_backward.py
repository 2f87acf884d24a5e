"""The backward of the attention kernel, over a work list: dq, dk and dv in one pass.

An item is a stack of `depth` tiles of P query rows of one KV head, against `tile_k` keys, as the
forward's. Scores and their gradient are computed once, for five products in all: q k, dout v, and
the three sums. dq is summed in SBUF over the items of a stack, in float32; dk and dv in PSUM over
the tiles of the stack. In one launch no query row belongs to two stacks and no key to two items;
what several launches sum, they add to float32 in HBM, one after the other: no atomics, and the same
bits every time.

Sums over the queries leave probabilities as they are; the sum over keys takes the transposed
gradient of scores. `backward_sums.py` says how they come out. DMA transposes beside TensorE where
it can (`transposes_by_dma`).
"""

from torch_paged_attn.backends.neuron.kernels.backward_groups import (
    COLUMNS,
    LEVEL,
    NUM_SCALARS,
    BackwardStack,
    BackwardTensors,
    Transposed,
)
from torch_paged_attn.backends.neuron.kernels.backward_sums import (
    add_to_sums,
    begin_and_turn,
    new_sums,
    queries_come_as_rows,
    room_for_queries,
    scaled_rows,
    scaled_sums,
    store_rows,
    sum_rows_over_keys,
    sum_turned_over_keys,
    turn_back,
    turns_beside_dk,
)
from torch_paged_attn.backends.neuron.kernels.backward_tile import TOGETHER, deltas, differentiate
from torch_paged_attn.backends.neuron.kernels.gather_scatter import P, gather_rows
from torch_paged_attn.backends.neuron.kernels.groups import RowLayout, table_columns
from torch_paged_attn.backends.neuron.kernels.load_item import load_item
from torch_paged_attn.backends.neuron.kernels.program import loaded_count, start_program
from torch_paged_attn.backends.neuron.kernels.query_tile import (
    clear_unseen,
    filled,
    transposes_by_dma,
    turn_rows,
    turn_tiles,
)
from torch_paged_attn.backends.neuron.toolchain import nisa, nl


def new_stack(q, dout, dq, program):
    """A stack that has seen no key."""
    options = program.options
    depth, dim, dim_v = options.depth, options.k_row.dim, options.v_row.dim
    steps = (dim + P - 1) // P
    prior, dq_dtype = None, nl.float32
    if options.backward.one_product:
        dq_dtype = dq.dtype
    if queries_come_as_rows(q.dtype, options):
        kept = nl.ndarray((P, depth, dim), dtype=dq_dtype, buffer=nl.sbuf)
    else:
        kept = nl.ndarray((min(dim, P), steps, depth, P), dtype=dq_dtype, buffer=nl.sbuf)
    if options.backward.adds_dq or options.backward.adds_dkv:
        prior = filled((P, max(dim, dim_v)), nl.float32, 0.0)
    room = room_for_queries(q.dtype, options)
    queries = nl.ndarray((P, room, dim), dtype=q.dtype, buffer=nl.sbuf)
    if room > depth:
        nisa.tensor_copy(dst=queries[:, depth], src=program.identity, engine=nisa.engine.gpsimd)
    stack = BackwardStack(
        q=queries,
        dout=nl.ndarray((P, depth, dim_v), dtype=dout.dtype, buffer=nl.sbuf),
        out=nl.ndarray((P, depth, dim_v), dtype=dout.dtype, buffer=nl.sbuf),
        scalars=nl.ndarray((P, depth, NUM_SCALARS), dtype=nl.float32, buffer=nl.sbuf),
        dq=kept,
        prior=prior,
        exact=nl.shared_identity_matrix(P, dtype=nl.float32),
    )
    # the first item of a program writes the rest
    if not options.backward.one_item:
        nisa.memset(dst=stack.dq, value=0.0)
    return stack


def load_rows(stack, index, tensors, program):
    """Load the rows of a stack that begins, and forget the sums of the one before."""
    columns = program.columns
    dim, dim_v = program.options.k_row.dim, program.options.v_row.dim
    for level in range(program.options.depth):
        rows = index[:, columns.load + level : columns.load + level + 1]
        skip = nisa.oob_mode.skip
        gather_rows(stack.q[:, level], tensors.q, rows, RowLayout(0, 0, 0, dim), 1, 1, skip)
        for_v = RowLayout(0, 0, 0, dim_v)
        gather_rows(stack.dout[:, level], tensors.dout, rows, for_v, 1, 1, skip)
        gather_rows(stack.out[:, level], tensors.out, rows, for_v, 1, 1, skip)
        numbers = RowLayout(0, 0, 0, NUM_SCALARS)
        gather_rows(stack.scalars[:, level], tensors.row_scalars, rows, numbers, 1, 1, skip)


def begin_stack(stack, is_first, options):
    """Forget the last stack's sums where `is_first` (P, 1) is 1: always, with `one_item`. With
    `one_product` there are none.
    """
    if options.backward.one_product:
        return
    size, width = stack.dq.shape[0], stack.dq.shape[1] * stack.dq.shape[2] * P
    sums = stack.dq.reshape((size, width))
    if options.backward.one_item:
        nisa.memset(dst=sums, value=0.0)
    else:
        begins = nl.ndarray((P, 1), dtype=nl.uint8, buffer=nl.sbuf)
        nisa.tensor_copy(dst=begins, src=is_first)
        predicate = begins.ap(pattern=[[1, size], [0, width]])
        nisa.tensor_copy_predicated(dst=sums, src=0.0, predicate=predicate)


def turn(stack, item, program):
    """Queries, their gradients, keys and values with head_dim on the partitions; rows' deltas."""
    identity, by_dma = program.identity, transposes_by_dma(stack.q.dtype, program.options)
    tile_k = item.k.shape[1] * P
    k = turn_rows(item.k[:, :, 0, 0], identity, by_dma)
    v = turn_rows(item.v[:, :, 0, 0], identity, by_dma)
    return Transposed(
        q=turn_rows(stack.q[:, 0 : program.options.depth], identity, by_dma),
        dout=turn_rows(stack.dout, identity, by_dma),
        k=k.reshape((P, k.shape[1], tile_k)),
        v=v.reshape((P, v.shape[1], tile_k)),
        delta=deltas(stack),
    )


def attend_part(part, transposed, stack, item, tensors, program):
    """Everything that is done for `width` keys of an item, and the tiles that see some of them."""
    options, backward = program.options, program.options.backward
    width = backward.width
    seen = backward.visible_tiles[part]
    dim, dim_v = options.k_row.dim, options.v_row.dim
    by_dma = transposes_by_dma(stack.q.dtype, options)
    dk, dv, turns_beside = None, None, turns_beside_dk(seen, stack.q.dtype, options)
    if backward.wants_dkv:
        dk = new_sums(dim, seen, stack.q.dtype, options, turns_beside)
        dv = new_sums(dim_v, seen, stack.q.dtype, options, False)
    for start in range(0, len(seen), TOGETHER):
        together = seen[start : start + TOGETHER]
        lowest, tiles = together[-1][LEVEL], len(together)
        dx_turned = nl.ndarray((P, width // P, tiles * P), dtype=stack.q.dtype, buffer=nl.sbuf)
        for number in range(tiles):
            level, columns = together[number][LEVEL], together[number][COLUMNS]
            is_further = level < seen[0][LEVEL]
            p, dx = differentiate(together[number], part, transposed, stack, item, tensors, program)
            if backward.wants_dkv:
                add_to_sums(dv, stack.dout[:, level], p, is_further)
            place = (level - lowest) * P
            target = dx_turned[:, 0 : columns // P, place : place + P]
            if turns_beside and not is_further:
                begin_and_turn(dk, target, stack.q, level, dx)
            else:
                if backward.wants_dkv:
                    add_to_sums(dk, stack.q[:, level], dx, is_further)
                if backward.wants_dq:
                    in_tiles = dx.reshape((P, columns // P, P))
                    turn_tiles(target, in_tiles, program.identity, by_dma)
        if backward.wants_dq and queries_come_as_rows(stack.q.dtype, options):
            sum_rows_over_keys(stack, together, dx_turned, item, options)
        elif backward.wants_dq:
            sum_turned_over_keys(stack, together, part, dx_turned, item, options)
    if backward.wants_dkv:
        store_keys(tensors.dk, dk, backward.out_scale, part, stack, item, program)
        store_keys(tensors.dv, dv, options.keep_scale, part, stack, item, program)


def store_keys(target, sums, scale, part, stack, item, program):
    """Store scale * `sums` (`TokenSums`) as rows of dk or dv."""
    backward = program.options.backward
    chunks = backward.width // P
    if sums.as_rows:
        rows = scaled_rows(sums, scale, target)
    else:
        rows = turn_back(scaled_sums(sums.sums, chunks, scale, target), target, stack, program)
    first = program.columns.keys + part * chunks
    places = item.index[:, first : first + chunks]
    store_rows(target, rows, places, backward.adds_dkv, stack)


def store_queries(stack, index, tensors, program):
    """Store the rows of dq where `index` names any: with the last item of a stack."""
    options, columns, backward = program.options, program.columns, program.options.backward
    for first in range(0, options.depth, TOGETHER):
        last = min(first + TOGETHER, options.depth)
        if queries_come_as_rows(stack.q.dtype, options):
            rows = stack.dq[:, first:last]
        else:
            sums = stack.dq[:, :, first:last]
            if not backward.one_product:
                sums = scaled_sums(sums, last - first, backward.out_scale, tensors.dq)
            rows = turn_back(sums, tensors.dq, stack, program)
        places = index[:, columns.store + first : columns.store + last]
        store_rows(tensors.dq, rows, places, backward.adds_dq, stack)


def differentiate_item(number, stack, tensors, program):
    """Everything that is done for one item."""
    options, backward = program.options, program.options.backward
    item, is_first = load_item(number, tensors, program), program.columns.is_first
    load_rows(stack, item.index, tensors, program)
    begin_stack(stack, item.bound[:, is_first : is_first + 1], options)
    if not options.sees_all_keys:
        clear_unseen(item.k, 0, item.unseen)
        clear_unseen(item.v, 0, item.unseen)
    transposed = turn(stack, item, program)
    for part in range(options.chunks * P // backward.width):
        if len(backward.visible_tiles[part]) > 0:
            attend_part(part, transposed, stack, item, tensors, program)
    if backward.wants_dq:
        store_queries(stack, item.index, tensors, program)


def attention_backward_kernel(
    dq, dk, dv, dbias, q, k, v, dout, out, indices, bounds, positions, count, words, row_scalars,
    bias, options,
):  # fmt: skip
    """Add the listed rows' and keys' gradients to dq, dk and dv, and store that of the bias.

    q, dq: (total_q * num_heads, head_dim); dout, out: the same of head_dim_v. k, v: their storage
    as (rows, row size), each row as `options.k_row` and `v_row` say. dk, dv: (total_k *
    num_kv_heads, head_dim or head_dim_v). indices (num_items, P, columns) int32 and bounds
    (num_items, P, columns) float32: see `TableColumns`; an index of -1 is skipped. positions,
    count, words and bias: as in `attention_kernel`. row_scalars (total_q * num_heads, NUM_SCALARS)
    float32. dbias (rows, tile_k) float32. dq, or dk and dv, are float32 where launches add to them,
    else of q's type.
    """
    columns, width = table_columns(options, options.chunks), options.backward.width
    program = start_program(q.dtype, indices.shape[0], words, options, columns, width)
    stack = new_stack(q, dout, dq, program)
    tensors = BackwardTensors(
        dq, dk, dv, dbias, q, k, v, dout, out, indices, bounds, positions, row_scalars, bias
    )

    def body(number):
        differentiate_item(number, stack, tensors, program)

    if options.is_dynamic:
        nl.fori_loop(0, loaded_count(count), body)
    else:
        for number in range(program.num_items):
            body(number)
    return dq, dk, dv, dbias
