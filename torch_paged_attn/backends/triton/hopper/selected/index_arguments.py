"""The groups of arguments of the kernel that scores index keys."""

from typing import Any, NamedTuple

# keys of a tile, and keys for which a program keeps its queries, at most
KEYS, CHUNK = 64, 2048


class IndexPointers(NamedTuple):
    weights: Any  # (total_q, num_heads) float32, contiguous
    scores: Any  # (rows, G, num_keys) float32
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    block_table: Any
    q_position: Any
    k_start: Any = None


class IndexSizes(NamedTuple):
    first_row: int
    stop_row: int
    num_keys: int  # of a row of scores
    batch: int
    num_rows: int  # packed: keys of all sequences; pages: their number
    max_pages: int  # of a sequence
    stride_table: int
    page_rows: int  # slots from one page to the next


class IndexOptions(NamedTuple):
    WIDTH: int
    GROUP_SIZE: int  # index heads of a key head
    GROUPS: int
    TOKENS: int  # of a tile of queries
    PAGE_SIZE: int  # 0: packed keys
    BOX_ROWS: int  # keys that are loaded at a time
    HAS_RIGHT: bool  # tokens see no key behind their position
    IS_RELU: bool
    CONSUMERS: int
    Q_STAGES: int
    KEY_STAGES: int
    REGISTERS: int  # of a consumer's thread
    IS_SLOTS: bool = False


class IndexParams(NamedTuple):
    q_desc: Any
    k_desc: Any
    pointers: IndexPointers
    sizes: IndexSizes
