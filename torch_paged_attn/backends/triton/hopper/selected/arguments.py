"""The groups of arguments of the kernel for lists of latent keys, as in `forward/arguments.py`."""

from typing import Any, NamedTuple


class ListPointers(NamedTuple):
    out: Any  # (total_q, num_heads, 512), contiguous
    lse: Any  # (num_heads, total_q) float32
    parts: Any  # workspace, as `mla/combine.py` describes it
    latents: Any  # the values, which are 512 columns of the keys
    ropes: Any  # the other 64 columns of the keys
    key_indices: Any  # (total_q, 1, K)
    num_selected: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    block_table: Any
    k_start: Any
    q_position: Any
    sinks: Any
    scales: Any = None  # of each 128 columns of values, which have 8 bits then


class ListSizes(NamedTuple):
    total_q: int
    batch: int
    entries: int  # of a list; of keys in order, of a sequence at most
    num_rows: int  # packed: keys of all sequences; pages: their number
    max_pages: int  # of a sequence
    stride_index_token: int
    stride_count_token: int
    stride_table: int
    units: int  # of work, of a token and tile of heads
    unit_pairs: int  # pairs of blocks of keys of a unit


class ListScalars(NamedTuple):
    """Numbers that follow from the description of a call. Strides of keys are in pieces of 16
    bytes."""

    num_heads: int
    stride_index: int
    page_pieces: int
    slot_pieces: int
    rope_page_pieces: int
    rope_slot_pieces: int
    left: int
    right: int
    scale_log2: float


class ListOptions(NamedTuple):
    """What the kernels are compiled for; the names that consumers read are those of
    `MlaOptions`."""

    HEAD_TILES: int  # tiles of 64 heads of a token
    PAGE_SIZE: int  # 0 for packed keys
    IS_SLOTS: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_ROPE: bool  # keys have 64 columns that are no values
    IS_ONE_ROW: bool  # these lie as far apart as the values do
    ROPE_COLUMN: int  # the first of them in a query
    REGISTERS: int  # of a consumer's thread
    COLUMN_BOXES: int  # in which a quarter arrives
    PACKED_HEADS: int = 64
    TOKENS: int = 1
    ROWS: int = 64
    IS_CAUSAL: bool = False  # the lists hide keys
    OF_LISTS: bool = True
    HAS_SCALES: bool = False  # the latents have 8 bits, and scales by column
    STAGES: int = 0  # groups of columns of 8 bits that have room
    CONVERTED: int = 0  # the same of 16 bits
    CONVERTERS: int = 0  # groups of warps that convert them
    PROGRAMS: int = 1  # of a multiprocessor
    IN_ORDER: bool = False  # no lists: all keys of a sequence (`in_order.py`)
    UNIT_KEYS: int = 0  # of a unit of work then


class ListParams(NamedTuple):
    q_desc: Any
    q_rope_desc: Any
    pointers: ListPointers
    sizes: ListSizes
    scalars: ListScalars
