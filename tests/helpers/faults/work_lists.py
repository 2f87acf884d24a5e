"""Faults in how the forward is planned on the host: items, tiles, tables."""

from faults.fault import BYTES, SHARED, Fault, suite

SPARSE = suite("test_agrees and phi3")

FAULTS = (
    Fault("page ids unchecked", "tables.py", ".clamp(0, host.k.shape[0] - 1)", "", BYTES),
    Fault(
        "page ids one short",
        "tables.py",
        "host.k.shape[0] - 1)",
        "host.k.shape[0] - 2)",
        ("tests/neuron/test_attention.py", "-k", "one_by_one"),
    ),
    Fault(
        "heads that share a gather get the first one's keys",
        "tables.py",
        "* rows[0].rows_of_head",
        "* 0",
        SHARED,
    ),
    Fault(
        "a run of shared keys passes the end of what is seen",
        "work_list.py",
        "longest = grain * tile.share",
        "longest = grain",
        SHARED,
    ),
    Fault(
        "every stack has long tiles",
        "work_list.py",
        "(shortest, stacks.of(~fits))",
        "(longer[-1], stacks.of(~fits))",
        SHARED,
    ),
    Fault(
        "a block more than is listed",
        "key_columns.py",
        "(block * size < stop[stack])",
        "(block * size < stop[stack] - size)",
        SPARSE,
    ),
    Fault(
        "heads share runs of more tokens than are contiguous",
        "tile_sizes.py",
        "        and fits % (2 * share * run) == 0\n",
        "",
        SHARED,
    ),
    Fault(
        "heads share a gather under a bias",
        "tile_sizes.py",
        " or call.attn_bias is not None",
        "",
        SHARED,
    ),
    Fault(
        "an odd number of heads shares a gather",
        "tile_sizes.py",
        "        and loaded % (2 * share) == 0\n",
        "",
        SHARED,
    ),
    Fault(
        "every stack has long tiles, whatever they add",
        "work_list.py",
        "MORE_COLUMNS = 1 / 8",
        "MORE_COLUMNS = 8",
        SHARED,
    ),
)
