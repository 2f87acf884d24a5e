"""What the attention kernel puts in shared memory, and for how many stages of tiles there is room.

`tuning` says how many stages a call is fastest with. What some calls have besides, places of rows
that are copied and rows of stretches, may leave room for fewer.
"""

from torch_paged_attn.backends.triton.hopper.forward.arguments import Options

# bytes that a program may have on Hopper
ROOM = 232448

# bytes of barriers and words, for each stage of queries and of keys, and, by consumers, what Triton
# takes for values that warps hand over; `test_shared_memory.py` compares with what is compiled
OF_Q_STAGE, OF_KV_STAGE = 88, 32
OF_TRITON = {1: 512, 2: 640, 3: 1152}
# the same where two consumers wait for rows that are copied
OF_COPIES = 104

# stages of tiles that were converted to 16 bits
CONVERTED_STAGES = 2
# producers that copy rows, each of which has room for the places of a tile's
COPYING = 4


def stages_of_scales(options: Options) -> int:
    """Tiles whose scales by token are kept. A consumer gives a tile of keys back before it has read
    the scales of its values: so there is room for more tiles than stages of keys; a power of two.
    """
    stages = CONVERTED_STAGES if options.CONVERTS_K else options.KV_STAGES
    return 4 if stages < 4 else 8


def bytes_of(options: Options, q_itemsize: int, kv_itemsize: float) -> int:
    """Bytes of shared memory that a program takes, an upper bound. An int4 has half a byte."""
    rows = options.ROW_GROUPS * options.BLOCK_M
    of_queries = rows * options.WIDTH * q_itemsize + OF_Q_STAGE
    tile = options.BLOCK_N * (options.WIDTH + options.WIDTH_V)
    of_keys = int(tile * kv_itemsize) + OF_KV_STAGE
    found = options.Q_STAGES * of_queries + options.KV_STAGES * of_keys
    found += OF_TRITON[options.CONSUMERS]
    if options.GATHERS:
        found += COPYING * options.BLOCK_N // options.KV_PARTS * 8
        found += OF_COPIES if options.CONSUMERS == 2 else 0
    if options.CONVERTS_K:
        found += CONVERTED_STAGES * (tile * 2 + 2 * OF_KV_STAGE)
    elif options.CONVERTS_V:
        found += CONVERTED_STAGES * (options.BLOCK_N * options.WIDTH_V * 2 + OF_KV_STAGE)
        found += rows * options.WIDTH_V * 2
    if options.BY_TOKEN:
        found += stages_of_scales(options) * 2 * options.BLOCK_N * 4
    if options.STRETCH:
        found += rows * 8
    if options.ROW_GROUPS < options.CONSUMERS:
        found += rows * (options.WIDTH_V * 4 + 8) + OF_KV_STAGE
    return found


def fit_stages(options: Options, q_itemsize: int, kv_itemsize: float) -> Options:
    """The options with as many stages as there is room for: if one has to go, of queries before
    keys."""
    # of keys that consumers divide, the number stays even: see `HopperConfig`
    fewer = options.CONSUMERS // options.ROW_GROUPS
    for kv_stages in range(options.KV_STAGES, 0, -fewer):
        # where a stage of keys goes, there may be room for the next queries
        most = options.Q_STAGES if kv_stages == options.KV_STAGES else max(options.Q_STAGES, 2)
        for q_stages in range(most, 0, -1):
            fitted = options._replace(KV_STAGES=kv_stages, Q_STAGES=q_stages)
            if bytes_of(fitted, q_itemsize, kv_itemsize) <= ROOM:
                return fitted
    return options
