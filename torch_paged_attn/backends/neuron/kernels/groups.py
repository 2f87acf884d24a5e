"""The groups that device functions take: compile-time options, tensors in HBM, tiles in SBUF.

Groups derive from `nl.NKIObject` and from nothing else, as NKI's language guide asks of classes.
"""

from dataclasses import dataclass
from typing import Any

from torch_paged_attn.backends.neuron.toolchain import nl


@dataclass
class RowLayout(nl.NKIObject):
    """A row of HBM: element (token, head, d) is at
    `offset + token * token_stride + head * head_stride + d`.
    """

    token_stride: int
    head_stride: int
    offset: int
    dim: int


@dataclass
class Options(nl.NKIObject):
    """What a kernel is compiled for."""

    num_kv_heads: int  # in a row of q
    group_size: int
    splits_heads: bool  # the programs of a logical core share the heads, else the items
    k_row: RowLayout
    v_row: RowLayout
    kv_dtype: str  # of keys and values that are stored as bytes; "" where it is q's
    depth: int  # tiles of query rows in a stack
    chunks: int  # of P * run keys in an item
    run: int  # tokens that lie side by side
    share: int  # KV heads among which a gather of keys divides its partitions
    scale: float  # divided by softcap if there is one
    softcap: float
    keep_scale: float  # of what dropout keeps
    bias_head_stride: int  # elements from one KV head's bias to the next
    has_sinks: bool
    has_alibi: bool
    has_scales: bool
    has_token_scales: bool
    has_bias: bool
    has_dropout: bool
    is_dynamic: bool  # a loop on the chip, else unrolled
    sees_all_keys: bool  # no key of an item is hidden from all its rows
    backward: Any  # `BackwardOptions`, or None in the forward


@dataclass
class TableColumns(nl.NKIObject):
    """Where the columns of an item's two tables begin: `depth` of each, or as many as it says."""

    # `indices`, int32: rows to load and to store
    load: int
    store: int
    k: int  # chunks: rows of k
    v: int  # chunks: rows of v
    token: int  # with dropout: tokens within their sequence
    head: int  # with dropout: sequence << 16 | head of the group
    keys: int  # the backward's, chunks: rows of dk and dv, -1 for a key that no row sees
    bias: int  # with a bias: rows of it
    dbias: int  # where its gradient is asked for: rows of that
    # `bounds`, float32: which columns of keys a row sees, and the row's position
    start: int
    stop: int
    position: int
    is_first: int  # 1: whether the stack begins
    key_start: int  # 1: which columns any row sees
    key_stop: int  # 1
    absent: int  # with a bias, chunks * run: whether it hides the key from all rows


def table_columns(options, key_rows):
    """The columns of the tables that a kernel with these options loads; `key_rows`: how many of an
    item have rows of dk and dv.
    """
    depth, chunks = options.depth, options.chunks
    token = 2 * depth + 2 * chunks
    keys = token
    if options.has_dropout:
        keys = token + 2 * depth
    return TableColumns(
        load=0,
        store=depth,
        k=2 * depth,
        v=2 * depth + chunks,
        token=token,
        head=token + depth,
        keys=keys,
        bias=keys + key_rows,
        dbias=keys + key_rows + depth,
        start=0,
        stop=depth,
        position=2 * depth,
        is_first=3 * depth,
        key_start=3 * depth + 1,
        key_stop=3 * depth + 2,
        absent=3 * depth + 3,
    )


@dataclass
class Tensors(nl.NKIObject):
    """The tensors in HBM that an item reads and writes."""

    out: Any
    lse: Any
    q: Any
    k: Any
    v: Any
    indices: Any
    bounds: Any
    positions: Any
    row_scalars: Any
    bias: Any
    token_scales: Any


@dataclass
class Program(nl.NKIObject):
    """The share of one physical core of a logical one, and its tiles that never change."""

    options: Options
    columns: TableColumns
    first_item: int
    num_items: int
    first_head: int
    heads: int
    identity: Any  # (P, P)
    ones: Any  # (1, P) float32, or None without scales by token
    key_of_column: Any  # (P, tile_k)
    key_of_partition: Any  # (P, chunks * run): of values
    key_of_share: Any  # (P, chunks * share * run): of keys, on the second generation
    philox: Any  # `philox.Constants`, or None without dropout


@dataclass
class Stack(nl.NKIObject):
    """What a stack of query tiles keeps from item to item, on P partitions."""

    q: Any  # (P, depth, heads, head_dim)
    scalars: Any  # (P, depth, heads, NUM_SCALARS)
    maxima: Any  # (P, depth * heads)
    sums: Any  # (P, depth * heads)
    acc: Any  # (P, depth, heads, head_dim_v)


@dataclass
class Item(nl.NKIObject):
    """What is loaded for an item: its tables, its keys and its values."""

    index: Any  # (P, columns of `indices`)
    bound: Any  # (P, columns of `bounds`)
    k: Any  # (P, chunks, heads / share, share * run, head_dim)
    v: Any  # (P, chunks, heads, run, head_dim_v)
    unseen: Any  # (P, chunks * run): values that no row sees
    unseen_k: Any  # (P, chunks * share * run): keys, on the second generation
    position: Any  # (P, tile_k): of the keys, for ALiBi
    quad: Any  # (P, tile_k / 4): position / 4, for dropout
