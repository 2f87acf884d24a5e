"""The groups of arguments of the kernel for latent attention (MLA), as the host fills them."""

from typing import Any, NamedTuple


class MlaPointers(NamedTuple):
    """Memory reached by address; None where a call has no such tensor."""

    lse: Any  # (num_heads, total_q) float32
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    block_table: Any
    parts: Any  # workspace for tiles whose keys several programs share: see `combine.py`


class MlaSizes(NamedTuple):
    """Numbers that differ from call to call of one model."""

    num_pages: int
    batch: int
    total_q: int
    max_keys: int  # of a sequence
    stride_table: int


class MlaScalars(NamedTuple):
    """Numbers that follow from the description of a call."""

    num_heads: int
    page_rows: int  # slots from one page to the next
    scale_log2: float  # from scores to exponents of two


class MlaOptions(NamedTuple):
    """What the kernel is compiled for."""

    TOKENS: int  # of a tile
    PACKED_HEADS: int  # rows of a token
    HEAD_TILES: int  # tiles of a token's heads
    PAGE_SIZE: int  # 0 for packed keys
    BOX_ROWS: int  # rows of keys that the accelerator loads at once
    IS_CAUSAL: bool
    REGISTERS: int  # of a consumer's thread
    COLUMN_BOXES: int  # in which a quarter arrives (`pipeline.py`); 1 for keys of 8 bits
    ROWS: int = 64  # of a tile of queries
    UNIT_KEYS: int = 128  # of a unit of work: see `producer.py`
    PROGRAMS: int = 1  # that a multiprocessor has room for
    # only for keys of 8 bits: their format (`dequant.py`), consumers of a program, and blocks of
    # keys for which a program has room
    FORMAT: str = ""
    CONSUMERS: int = 2
    STAGES: int = 0
    # windows, which `scores.mask_window` asks for and this kernel does not have
    HAS_LEFT: bool = False
    HAS_RIGHT: bool = False
    # lists name the keys, which threads copy (`selected/kernel.py`)
    OF_LISTS: bool = False
    HAS_ROPE: bool = True


class MlaParams(NamedTuple):
    """All that the host passes, as the warps of a program share it."""

    # boxes of 256 columns (of keys, fewer: a column box), and of the 64 columns past the values
    q_desc: Any
    q_rope_desc: Any
    k_desc: Any
    k_rope_desc: Any
    out_desc: Any
    pointers: MlaPointers
    sizes: MlaSizes
    scalars: MlaScalars


class MlaBytesPointers(NamedTuple):
    """Memory reached by address where keys have 8 bits: that of `MlaPointers`, and more."""

    lse: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    block_table: Any
    parts: Any
    q: Any  # (total_q, num_heads, 576)
    out: Any  # (total_q, num_heads, 512), contiguous
    q_descale: Any
    k_descale: Any
    v_descale: Any


class MlaBytesScalars(NamedTuple):
    """Numbers that follow from the description of such a call."""

    num_heads: int
    page_rows: int
    scale_log2: float
    q_token: int  # strides of queries
    q_head: int
    q_descale_batch: int  # strides of descales, 0 where one is shared
    k_descale_batch: int
    v_descale_batch: int


class MlaBytesParams(NamedTuple):
    """All that the host passes where keys have 8 bits."""

    k_desc: Any  # boxes of 128 columns
    k_rope_desc: Any  # boxes of the 64 columns past the values
    pointers: MlaBytesPointers
    sizes: MlaSizes
    scalars: MlaBytesScalars
