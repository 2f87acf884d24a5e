"""The groups of arguments of the kernel for latent attention, as in `forward/arguments.py`."""

from typing import Any, NamedTuple


class MlaPointers(NamedTuple):
    lse: Any  # (num_heads, total_q) float32
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    block_table: Any
    parts: Any  # workspace for tiles whose keys several programs share: see `combine.py`
    # only for keys of 8 bits
    q: Any = None  # (total_q, num_heads, 576)
    out: Any = None  # (total_q, num_heads, 512), contiguous
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None


class MlaSizes(NamedTuple):
    num_pages: int
    batch: int
    total_q: int
    max_keys: int  # of a sequence
    stride_table: int


class MlaScalars(NamedTuple):
    num_heads: int
    page_rows: int  # slots from one page to the next
    scale_log2: float  # from scores to exponents of two
    # only for keys of 8 bits: strides of queries, and of descales, 0 where one is shared
    q_token: int | None = None
    q_head: int | None = None
    q_descale_batch: int | None = None
    k_descale_batch: int | None = None
    v_descale_batch: int | None = None


class MlaOptions(NamedTuple):
    TOKENS: int  # of a tile
    PACKED_HEADS: int  # rows of a token
    HEAD_TILES: int  # tiles of a token's heads
    PAGE_SIZE: int  # 0 for packed keys
    BOX_ROWS: int  # rows of keys that the accelerator loads at once
    IS_CAUSAL: bool
    REGISTERS: int  # of a consumer's thread
    COLUMN_BOXES: int  # in which a quarter arrives (`pipeline.py`); 1 for keys of 8 bits
    ROWS: int  # of a tile of queries
    UNIT_KEYS: int  # of a unit of work: see `shares.py`
    PROGRAMS: int  # that a multiprocessor has room for
    CONSUMERS: int  # of a program
    # only for keys of 8 bits: their format (`dequant.py`), and blocks of keys for which a program
    # has room
    FORMAT: str
    STAGES: int
    # windows, which `scores.mask_window` asks for and this kernel does not have
    HAS_LEFT: bool = False
    HAS_RIGHT: bool = False
    # lists name the keys, which threads copy (`selected/kernel.py`)
    OF_LISTS: bool = False
    HAS_ROPE: bool = True


class MlaParams(NamedTuple):
    # boxes of 256 columns, and of the 64 columns past the values; None for keys of 8 bits
    q_desc: Any
    q_rope_desc: Any
    # boxes of fewer columns, and of the 64 columns past the values
    k_desc: Any
    k_rope_desc: Any
    out_desc: Any  # None for keys of 8 bits
    pointers: MlaPointers
    sizes: MlaSizes
    scalars: MlaScalars
