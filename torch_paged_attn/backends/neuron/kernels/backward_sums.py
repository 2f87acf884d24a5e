"""The backward's sums: dk and dv over query rows, dq over keys; how they come out of TensorE.

Transposed, (dim, tokens), they take one product for up to 512 tokens, and are transposed back
before they are stored. As rows, (tokens, dim), they take a product for each block of P rows by P
keys, and are stored as they are. Rows are chosen where TensorE would do the turning, and they take
no more of its instructions: then they move fewer columns through it, and leave out a copy from
PSUM.

Where dk comes as rows on the second generation, which turns by multiplying, the gradients of scores
of the first tile that adds to it are transposed by the same products: what moves is its queries and
the identity, side by side. (For the other tiles PSUM would have to add to one half of a result, and
overwrite the other.)
"""

from torch_paged_attn.backends.neuron.kernels.backward_groups import COLUMNS, LEVEL, TokenSums
from torch_paged_attn.backends.neuron.kernels.backward_tile import TOGETHER
from torch_paged_attn.backends.neuron.kernels.gather_scatter import P, gather_rows, scatter_rows
from torch_paged_attn.backends.neuron.kernels.groups import RowLayout
from torch_paged_attn.backends.neuron.kernels.query_tile import BANK, transposes_by_dma, turn_tiles
from torch_paged_attn.backends.neuron.toolchain import nisa, nl


def blocks_of(seen):
    """How many blocks of P rows by P keys the tiles `seen` of a part's `visible_tiles` have."""
    blocks = 0
    for place in range(len(seen)):
        blocks = blocks + seen[place][COLUMNS] // P
    return blocks


def come_as_rows(blocks, products, tiles, dim, dtype, options):
    """Whether sums for `tiles` of P tokens, over `blocks`, come out as rows; transposed they take
    `products` for each P of dim. `dtype` is q's, not that of the results, which another sequence of
    the batch may make float32: a sequence's bits depend on it alone.
    """
    if transposes_by_dma(dtype, options) or tiles * dim > BANK:
        return False
    steps = (dim + P - 1) // P
    return blocks <= steps * (products + tiles)


def queries_come_as_rows(dtype, options):
    """Whether dq does: only where a product is the whole sum of a tile of rows."""
    if not options.backward.one_product:
        return False
    seen, as_rows = options.backward.visible_tiles[0], True
    for start in range(0, len(seen), TOGETHER):
        together = seen[start : start + TOGETHER]
        blocks, chunks = blocks_of(together), options.backward.width // P
        if not come_as_rows(blocks, chunks, len(together), options.k_row.dim, dtype, options):
            as_rows = False
    return as_rows


def turns_beside_dk(seen, dtype, options):
    """Whether the products that begin dk also turn their tile of gradients."""
    dim, second = options.k_row.dim, nisa.get_nc_version() == nisa.nc_version.gen2
    backward = options.backward
    if not second or not backward.wants_dq or not backward.wants_dkv or len(seen) == 0:
        return False
    # two tiles side by side are as wide, and there is a bank more for them
    if dim != P or options.v_row.dim > 2 * P:
        return False
    return come_as_rows(blocks_of(seen), len(seen), backward.width // P, dim, dtype, options)


def room_for_queries(dtype, options):
    """Tiles of a stack of queries, and one for the identity where it moves beside them."""
    beside = 0
    for part in range(len(options.backward.visible_tiles)):
        if turns_beside_dk(options.backward.visible_tiles[part], dtype, options):
            beside = 1
    return options.depth + beside


def new_sums(dim, seen, dtype, options, is_beside):
    """Room in PSUM for dk's or dv's sums over the tiles `seen` for `width` keys; `is_beside`: and
    for a transposed tile beside them.
    """
    width, steps = options.backward.width, (dim + P - 1) // P
    chunks, room = width // P, width
    if is_beside:
        # in pairs, for a product lies within a bank
        sums = nl.ndarray((P, (chunks + 1) // 2 * 2, dim + P), dtype=nl.float32, buffer=nl.psum)
        return TokenSums(sums=sums[:, 0:chunks], as_rows=True, together=2)
    if come_as_rows(blocks_of(seen), len(seen), chunks, dim, dtype, options):
        sums = nl.ndarray((P, chunks, dim), dtype=nl.float32, buffer=nl.psum)
        return TokenSums(sums=sums, as_rows=True, together=chunks)
    if BANK % room != 0 and steps > 1:
        # each step of dim within one bank
        room = BANK
    sums = nl.ndarray((min(dim, P), steps, room), dtype=nl.float32, buffer=nl.psum)
    return TokenSums(sums=sums[:, :, 0:width], as_rows=False, together=chunks)


def add_to_sums(token_sums, rows, weights, is_further):
    """The first columns of sums += rows (P, dim) over weights (P, columns); = if not further."""
    sums, dim, columns = token_sums.sums, rows.shape[1], weights.shape[1]
    if token_sums.as_rows:
        for chunk in range(columns // P):
            part = weights[:, chunk * P : chunk * P + P]
            nisa.nc_matmul(
                dst=sums[:, chunk, 0:dim], stationary=part, moving=rows, accumulate=is_further
            )
    else:
        for step in range(sums.shape[1]):
            start, stop = step * P, min(dim, step * P + P)
            dst, part = sums[0 : stop - start, step, 0:columns], rows[:, start:stop]
            nisa.nc_matmul(dst=dst, stationary=part, moving=weights, accumulate=is_further)


def begin_and_turn(token_sums, dst, q, level, dx):
    """Sums = queries of a level over dx (P, width); dst (P, width / P, P) = dx transposed.

    q (P, depth + 1, P) ends in the identity.
    """
    sums, places = token_sums.sums, q.shape[1]
    chunks = sums.shape[1]
    moving = q.ap(
        pattern=[[places * P, P], [(places - 1 - level) * P, 2], [1, P]], offset=level * P
    )
    for chunk in range(chunks):
        part = dx[:, chunk * P : chunk * P + P]
        nisa.nc_matmul(dst=sums[:, chunk], stationary=part, moving=moving, accumulate=False)
    for first in range(0, chunks, token_sums.together):
        last = min(first + token_sums.together, chunks)
        nisa.tensor_copy(dst=dst[:, first:last], src=sums[:, first:last, P : 2 * P])


def scaled_rows(token_sums, scale, target):
    """scale * sums given as rows, in target's type: (P, width / P, dim)."""
    chunks, dim = token_sums.sums.shape[1], target.shape[1]
    rows = nl.ndarray((P, chunks, dim), dtype=target.dtype, buffer=nl.sbuf)
    for first in range(0, chunks, token_sums.together):
        last = min(first + token_sums.together, chunks)
        data = token_sums.sums[:, first:last, 0:dim]
        nisa.activation(dst=rows[:, first:last], op=nl.copy, data=data, scale=scale)
    return rows


def unseen_columns(seen, chunk):
    """Columns of the transposed tiles `seen` that see no key of a chunk: the first ones."""
    columns = 0
    for place in range(len(seen)):
        if seen[place][COLUMNS] <= chunk * P:
            columns = columns + P
    return columns


def sum_rows_over_keys(stack, seen, dx_turned, item, options):
    """Add keys over the transposed gradients of some tiles, `seen`, to their dq: rows (P, tiles,
    dim), of all keys of an item.
    """
    lowest, tiles, dim = seen[-1][LEVEL], len(seen), stack.q.shape[2]
    rows = nl.ndarray((P, tiles, dim), dtype=nl.float32, buffer=nl.psum)
    for place in range(tiles):
        tile = seen[place][LEVEL] - lowest
        for chunk in range(seen[place][COLUMNS] // P):
            part, keys = dx_turned[:, chunk, tile * P : tile * P + P], item.k[:, chunk, 0, 0, :]
            nisa.nc_matmul(dst=rows[:, tile], stationary=part, moving=keys, accumulate=chunk > 0)
    total = stack.dq[:, lowest : lowest + tiles]
    nisa.activation(dst=total, op=nl.copy, data=rows, scale=options.backward.out_scale)


def sum_turned_over_keys(stack, seen, part, dx_turned, item, options):
    """The same for transposed dq, to which each part of an item's keys adds."""
    chunks, columns = dx_turned.shape[1], dx_turned.shape[2]
    dim, lowest, last = stack.q.shape[2], seen[-1][LEVEL], seen[0][LEVEL]
    for step in range(stack.dq.shape[1]):
        start, stop = step * P, min(dim, step * P + P)
        product = nl.ndarray((stop - start, columns), dtype=nl.float32, buffer=nl.psum)
        for chunk in range(chunks):
            # the tiles that see it are the last of these
            unseen = unseen_columns(seen, chunk)
            if unseen < columns:
                keys = item.k[:, part * chunks + chunk, 0, 0, start:stop]
                dst, moving = product[:, unseen:columns], dx_turned[:, chunk, unseen:columns]
                nisa.nc_matmul(dst=dst, stationary=keys, moving=moving, accumulate=chunk > 0)
        total = stack.dq[0 : stop - start, step, lowest : last + 1]
        if options.backward.one_product:
            nisa.activation(dst=total, op=nl.copy, data=product, scale=options.backward.out_scale)
        else:
            nisa.tensor_tensor(dst=total, data1=total, data2=product, op=nl.add)


def scaled_sums(sums, tiles, scale, target):
    """scale * transposed sums, tiles * P columns for each step of dim, in target's type:
    (dim, dim / P, tiles, P).
    """
    dim, steps = target.shape[1], sums.shape[1]
    scaled = nl.ndarray((sums.shape[0], steps, tiles, P), dtype=target.dtype, buffer=nl.sbuf)
    for step in range(steps):
        size = min(dim, step * P + P) - step * P
        nisa.activation(dst=scaled[0:size, step], op=nl.copy, data=sums[0:size, step], scale=scale)
    return scaled


def turn_back(scaled, target, stack, program):
    """Transposed tiles (dim, dim / P, tiles, P) as rows (P, tiles, dim) of target."""
    dim, steps, tiles = target.shape[1], scaled.shape[1], scaled.shape[2]
    by_dma, identity = transposes_by_dma(target.dtype, program.options), program.identity
    if target.dtype == nl.float32:
        identity = stack.exact
    rows = nl.ndarray((P, tiles, dim), dtype=target.dtype, buffer=nl.sbuf)
    for step in range(steps):
        start, stop = step * P, min(dim, step * P + P)
        size = stop - start
        source = scaled[0:size, step]
        turn_tiles(rows[:, :, start:stop], source, identity[0:size, 0:size], by_dma)
    return rows


def add_prior(rows, target, index, stack):
    """rows (P, dim) += the indexed rows of target."""
    dim = rows.shape[1]
    prior = stack.prior[:, 0:dim]
    gather_rows(prior, target, index, RowLayout(0, 0, 0, dim), 1, 1, nisa.oob_mode.skip)
    nisa.tensor_tensor(dst=rows, data1=rows, data2=prior, op=nl.add)


def store_rows(target, rows, index, is_added, stack):
    """Store rows (P, tiles, dim) where `index` (P, tiles) says, added to what is there or not."""
    dim = target.shape[1]
    for tile in range(rows.shape[1]):
        places = index[:, tile : tile + 1]
        if is_added:
            add_prior(rows[:, tile], target, places, stack)
        scatter_rows(target, rows[:, tile], places, RowLayout(0, 0, 0, dim), 1)
