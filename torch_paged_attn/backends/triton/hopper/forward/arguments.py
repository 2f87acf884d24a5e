"""The groups of arguments that the Hopper kernel takes, as the host fills them.

Three things decide a launch, and each has its groups:

- the description of the call (dtypes, head dims, strides, options) together with the choice of
  tiles: `Options`, for which the kernel is compiled, and `Scalars`;
- its sizes: `Sizes` and the grid, which no kernel is compiled for;
- its memory: `Pointers` and the four tensor maps.
"""

from typing import Any, NamedTuple


class Pointers(NamedTuple):
    """Memory reached by address; None where a call has no such tensor."""

    lse: Any  # (num_heads, total_q) float32
    tile_list: Any  # of `tile_scheduler.plan_tile_list`; None unless IS_LISTED
    block_table: Any
    entries: Any  # of `block_lists.plan_block_lists`
    spans: Any  # likewise
    alibi_slopes: Any
    sinks: Any
    parts: Any  # of `pieces.py`; None where no tile is cut
    # of 8-bit queries, keys and values
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    # None if IS_LISTED
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_k: Any = None
    # None unless GATHERS
    k: Any = None
    v: Any = None
    # (total_q, num_heads, head_dim_v), if it is float32 or merged from pieces by several programs;
    # None where the accelerator stores the result
    out: Any = None
    # of a tile's pieces that are done, where programs share tiles, and of claimed units of work, if
    # IS_NUMBERED; zeros before and after
    counters: Any = None


class Sizes(NamedTuple):
    """Numbers that differ from call to call of one model."""

    num_pages: int
    batch: int
    total_q: int
    # with a layout: lists of blocks. If IS_DEALT or IS_NUMBERED: keys that a block table has room
    # for. If tiles are not listed otherwise: units of a sequence. Else 0
    lists_per_head: int
    # not beside num_pages: ptxas would load both at once, and move more between register files
    stride_table: int
    # tiles of one KV head that are worked on one after the other; if numbered tiles are cut,
    # stretches of keys that each has room for
    heads_per_unit: int
    # slots from one page of keys to the next if IS_ROWS, since it is the length of a cache that may
    # grow; else None
    k_page_rows: Any = None
    v_page_rows: Any = None


class Scalars(NamedTuple):
    """Numbers that follow from the description of a call and its tiles."""

    num_heads: int
    stride_layout_batch: int  # in heads of a layout; 0 where the batch shares one
    k_page_rows: int  # slots from one page of keys to the next; 0 if IS_ROWS
    v_page_rows: int
    stride_alibi_batch: int
    stride_alibi_head: int
    window_left: int  # 0 where it hides nothing
    window_right: int
    # scores are q . k or, with a softcap, tanh(x) with x = softmax_scale * q . k / softcap
    scale_log2: float  # logits in base two are scores times this
    softcap_scale_log2: float  # exp(2 x) is two to the power of q . k times this
    alibi_scale: float  # what scores get of a slope is the slope times this
    q_descale_batch: int  # strides of descales, 0 where one is shared
    q_descale_head: int
    k_descale_batch: int
    k_descale_head: int
    v_descale_batch: int
    v_descale_head: int
    # elements from slot to slot, and from head to head, where rows are copied; else 0
    stride_k: int = 0
    stride_k_head: int = 0
    stride_v: int = 0
    stride_v_head: int = 0
    page_size: Any = None  # None unless PAGE_SIZE is -1
    # if BY_TOKEN, where `*_descale_batch` are strides of pages
    k_descale_slot: int = 0
    v_descale_slot: int = 0


class Options(NamedTuple):
    """What the kernel is compiled for.

    Values that follow from others are fields too: the key under which Triton stores a compiled
    kernel holds the fields, not the code of a property.
    """

    BLOCK_M: int  # rows of a consumer
    BLOCK_N: int  # keys of a tile
    WIDTH: int  # head_dim as it lies in shared memory
    WIDTH_V: int
    COLUMNS: int  # of WIDTH, those that hold numbers and are multiplied
    PACKED_HEADS: int  # query heads that share a tile: rows of a token
    TOKENS: int  # of a consumer: as many as its rows hold; rows that are left over belong to none
    GROUP_SIZE: int
    PAGE_SIZE: int  # 0 for packed keys and if IS_ROWS; -1: it is `Scalars.page_size`
    IS_ROWS: bool  # each sequence has one page, so that its keys are like packed ones
    IS_CAUSAL: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_SOFTCAP: bool
    HAS_LAYOUT: bool
    Q_BLOCK_SIZE: int  # of the layout, like the next three
    KEYS_PER_ENTRY: int  # consecutive keys that an entry of a list stands for: a run
    QUERIES_PER_LIST: int
    HEADS_PER_LAYOUT: int  # query heads that share a layout
    KV_STEP: int  # from one tile of keys to the next: in keys, or in entries of a list
    KV_PARTS: int  # producers that load a tile of keys together
    CONSUMERS: int
    ROW_GROUPS: int  # consumers with rows of their own: one, if two share them (`split_keys.py`)
    KV_STAGES: int
    Q_STAGES: int
    REGISTERS: int  # of a consumer's thread
    PINGPONG: bool
    MOST_PARTS: int  # pieces of tiles, see `pieces.py`; 0 where none is cut
    COUNTERS: int  # words of the list of tiles before its entries, or of scratch memory
    IS_LISTED: bool = True  # tiles come from a list, the longest first
    IS_DEALT: bool = False  # each program finds its share of the keys (`dealt_work.py`)
    IS_NUMBERED: bool = False  # programs find tiles by their numbers (`query_tiles.py`)
    LEAST_SHARE: int = 0  # if IS_DEALT: tiles of keys of a program's share, at least
    # of 8-bit keys and values: whether they are converted, see `converter.py`
    CONVERTS_K: bool = False
    CONVERTS_V: bool = False
    GATHERS: bool = False  # keys and values are copied row by row, from pages smaller than a box
    FLOAT32_COLUMNS: int = 0  # head_dim_v of a float32 result; 0: it is of q's dtype
    MERGED_COLUMNS: int = 0  # head_dim_v, where several programs add up pieces; else 0
    BY_TOKEN: bool = False  # keys and values have scales by token and head (`scales.py`)
    STRETCH: int = 0  # keys that have sums of their own, see `stretches.py`; 0: all have one


class Params(NamedTuple):
    """All that the host passes, as the warps of a program share it; `Options` are passed beside it,
    because a tuple cannot have constants and values.
    """

    q_desc: Any
    k_desc: Any
    v_desc: Any
    out_desc: Any
    pointers: Pointers
    sizes: Sizes
    scalars: Scalars
