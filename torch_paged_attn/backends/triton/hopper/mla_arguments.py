"""The groups of arguments of the kernel for latent attention (MLA), as the host fills them."""

from typing import Any, NamedTuple


class MlaPointers(NamedTuple):
    """Memory reached by address; None where a call has no such tensor."""

    lse: Any  # (num_heads, total_q) float32
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    block_table: Any
    parts: Any  # of tiles whose keys several programs share: see `mla_combine.py`


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

    TOKENS: int  # of a tile of 64 rows
    PACKED_HEADS: int  # rows of a token
    HEAD_TILES: int  # tiles of a token's heads
    PAGE_SIZE: int  # 0 for packed keys
    BOX_ROWS: int  # rows of keys that the accelerator loads at once
    IS_CAUSAL: bool
    REGISTERS: int  # of a consumer's thread
    PIECES: int  # of a unit, that are waited for one after the other
    # the windows of `scores.mask_window`, of which there are none
    HAS_LEFT: bool = False
    HAS_RIGHT: bool = False


class MlaParams(NamedTuple):
    """All that the host passes, as the warps of a program share it."""

    # boxes of 256 columns (of keys, of a piece of them), and of the 64 columns past the latent
    q_desc: Any
    q_rope_desc: Any
    k_desc: Any
    k_rope_desc: Any
    out_desc: Any
    pointers: MlaPointers
    sizes: MlaSizes
    scalars: MlaScalars
