"""What a kernel starts with: its share of the work, and the tiles that never change."""

from torch_paged_attn.backends.neuron.kernels.gather_scatter import P
from torch_paged_attn.backends.neuron.kernels.groups import Program
from torch_paged_attn.backends.neuron.kernels.philox import philox_constants
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
    chunks, run = options.chunks, options.run
    tile_k = chunks * run * P
    identity = nl.shared_identity_matrix(P, dtype=dtype)
    key_of_column = nl.ndarray((P, tile_k), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=key_of_column, pattern=[[1, tile_k]])
    key_of_partition = nl.ndarray((P, chunks * run), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=key_of_partition, pattern=[[P * run, chunks], [1, run]], channel_multiplier=run)
    key_of_share = key_of_partition
    if options.share > 1 and nisa.get_nc_version() == nisa.nc_version.gen2:
        part, longer = P // options.share, run * options.share
        key_of_share = nl.ndarray((P, chunks * longer), dtype=nl.float32, buffer=nl.sbuf)
        for first in range(0, P, part):
            nisa.iota(
                dst=key_of_share[first : first + part],
                pattern=[[P * run, chunks], [1, longer]],
                channel_multiplier=longer,
            )
    philox = None
    if options.has_dropout:
        philox = philox_constants(words, draw // 4)
    return Program(
        options, columns, first_item, num_items, first_head, heads,
        identity, key_of_column, key_of_partition, key_of_share, philox,
    )  # fmt: skip
