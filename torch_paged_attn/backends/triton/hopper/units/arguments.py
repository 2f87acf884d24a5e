"""The groups of arguments of the kernels that visit units of keys one after the other."""

from typing import Any, NamedTuple

# rows of a tile of queries; entries of an item of work, at most
BLOCK_M, MOST_ENTRIES = 64, 128


class UnitPointers(NamedTuple):
    entries: Any  # these five: of `unit_items.UnitLists`
    rows: Any
    items: Any
    num_items: Any
    last_keys: Any
    parts: Any  # (entries, group_size, head_dim_v) float16
    part_lse: Any  # (entries, group_size) float32, in base two
    part_scale: Any  # likewise: what a part is multiplied by
    k_first: Any  # where the packed keys of a sequence begin
    block_table: Any


class UnitCombinePointers(NamedTuple):
    """Memory of the kernel that adds parts up; None for sinks that a call does not have."""

    parts: Any  # these three: of `UnitPointers`
    part_lse: Any
    part_scale: Any
    buckets: Any  # of `unit_items.UnitLists`
    out: Any  # (total_q, num_heads, head_dim_v), contiguous
    lse: Any  # (num_heads, total_q) float32
    sinks: Any
    cu_seqlens_q: Any


class UnitQueryPointers(NamedTuple):
    """Memory of the kernel that copies queries."""

    q: Any
    entries: Any  # these four: of `unit_items.UnitLists`
    rows: Any
    items: Any
    num_items: Any
    copied: Any  # (entries, group_size, head_dim), of the dtype of q


class UnitSizes(NamedTuple):
    entries: int  # of a token: of all of its lists
    num_pages: int
    stride_table: int


class UnitScalars(NamedTuple):
    scale_log2: float
    k_page_rows: int  # slots from one page to the next
    v_page_rows: int


class UnitOptions(NamedTuple):
    BLOCK_N: int  # keys of a unit
    WIDTH: int
    WIDTH_V: int
    GROUP_SIZE: int  # query heads of a KV head: rows of a token
    TOKENS: int  # of a tile of queries
    PAGE_SIZE: int  # 0: packed keys
    IS_SLOTS: bool
    BOX_ROWS: int  # keys that are loaded at a time
    CONSUMERS: int
    PRODUCERS: int
    Q_STAGES: int
    KV_STAGES: int
    REGISTERS: int  # of a consumer's thread
    IS_COPIED: bool = False  # queries lie in the order of entries


class UnitParams(NamedTuple):
    q_desc: Any
    k_desc: Any
    v_desc: Any
    pointers: UnitPointers
    sizes: UnitSizes
    scalars: UnitScalars
