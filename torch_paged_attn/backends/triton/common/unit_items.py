"""Units of keys as items of work: what `unit_lists.py` makes, and kernels visit."""

from collections import namedtuple
from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.names import Names

# words of an item: the number of its first entry in `entries`, how many it has, the unit, its
# sequence and KV head, one past the last key that a token of the unit sees, and whether a token of
# it does not see all of its keys
ITEM_WORDS = tl.constexpr(8)
Words = namedtuple("Words", "FIRST COUNT UNIT BATCH HEAD STOP IS_CUT")
ITEM = Names(Words(*range(7)))

# of a token's heads, in a backward: lse in base two (+inf for a row that sees nothing), D, and the
# first and the last row of k that the token sees, as bits of int32
ROW_FIELDS = tl.constexpr(4)


class UnitLists(NamedTuple):
    """`entries` has the numbers of all entries that count, bucket by bucket, and `rows` their query
    rows. `items` `(most, 8)` are runs of entries of one bucket each, of which `num_items` `(1,)`
    are filled in. `buckets` `(rows, G, K)` says which entries count: it is -1 for others.
    `last_keys` `(rows,)`: the last key that a token may see. All int32; entries are numbered from
    query row `first_row` on.
    """

    entries: Tensor
    rows: Tensor
    items: Tensor
    num_items: Tensor
    buckets: Tensor
    last_keys: Tensor
    first_row: int


def units_of(call: AttentionCall) -> int:
    """How many units a sequence may have, or a cache if entries name units of it."""
    selection = call.lists
    keys = call.k.shape[0]
    if call.block_table is not None:
        keys = call.block_table.shape[1] * call.page_size
    elif call.is_slots:
        keys *= call.page_size
    return max(-(-keys // selection.select_size), 1)
