"""What a kernel starts with: its share of the work, and the tiles that never change."""

from torch_paged_attn.backends.neuron.kernels.gather_scatter import P
from torch_paged_attn.backends.neuron.kernels.groups import Program
from torch_paged_attn.backends.neuron.kernels.philox import philox_constants
from torch_paged_attn.backends.neuron.kernels.query_tile import filled
from torch_paged_attn.backends.neuron.toolchain import nisa, nl


def start_program(dtype, num_items, words, options, columns, draw):
    """The heads and items of this core of the logical one, and the tiles that never change.

    `columns` are those of the tables; dropout's bits are drawn for `draw` keys at a time.
    """
    programs, program = nl.num_programs(0), nl.program_id(0)
    heads, first_head, first_item = options.num_kv_heads, 0, 0
    if options.splits_heads:
        heads = options.num_kv_heads // programs
        first_head = program * heads
    else:
        num_items = num_items // programs
        first_item = program * num_items
    tile_k = options.chunks * options.run * P
    identity = nl.shared_identity_matrix(P, dtype=dtype)
    key_of_column = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=key_of_column, pattern=[[1, tile_k]])
    key_of_partition = keys_on_partitions(options, 1)
    key_of_share = key_of_partition
    if options.share > 1 and nisa.get_nc_version() == nisa.nc_version.gen2:
        key_of_share = keys_on_partitions(options, options.share)
    ones, philox = None, None
    if options.has_token_scales:
        ones = filled((1, P), nl.float32, 1.0)
    if options.has_dropout:
        philox = philox_constants(words, draw // 4)
    return Program(
        options, columns, first_item, num_items, first_head, heads,
        identity, ones, key_of_column, key_of_partition, key_of_share, philox,
    )  # fmt: skip


def keys_on_partitions(options, share):
    """The columns of the keys that a gather which `share` heads divide leaves on each partition,
    (P, chunks * share * run).
    """
    run, part, longer = options.run, P // share, options.run * share
    keys = nl.ndarray((P, options.chunks * longer), dtype=nl.float32, buffer=nl.sbuf)
    pattern = [[P * run, options.chunks], [1, longer]]
    for first in range(0, P, part):
        nisa.iota(dst=keys[first : first + part], pattern=pattern, channel_multiplier=longer)
    return keys


def loaded_count(count):
    """The number in `count` (1, 1), in a register."""
    tile = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=count)
    register = nisa.register_alloc()
    nisa.register_load(register, tile)
    return register
