"""The groups in which the attention kernel takes its arguments. `arguments.py` makes them.

A kernel is compiled for its `Options`; for the types of pointers and numbers; and for which of
`Pointers`, `Strides` and `Scalars` are None, 1 or multiples of 16 (passing None costs nothing).
`Sizes` change from call to call, and kernels are not compiled for their values.
"""

from typing import Any, NamedTuple


class Pointers(NamedTuple):
    """The kernel's tensors; None for those that a call does not have."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    parts: Any  # partial results, see `combine.py`
    counters: Any  # for each shared tile, how many programs have written their part
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    block_table: Any
    crow: Any
    col: Any
    bias: Any
    alibi: Any
    sinks: Any
    q_descale: Any
    k_descale: Any
    v_descale: Any
    out_scale: Any
    rng: Any
    q_latent: Any
    tail_mask: Any
    k_start: Any
    q_position: Any
    seen_tiles: Any  # of a bool mask, see `seen_tiles.py`; None: all of its tiles are visited


# the kernels' name of a pointer -> the name in the list of arguments, if it is different
ARGUMENTS = {
    "crow": "crow_indices",
    "col": "col_indices",
    "bias": "attn_bias",
    "alibi": "alibi_slopes",
    "rng": "rng_state",
}


class Strides(NamedTuple):
    """Strides in elements; 0 for a dimension along which a tensor is broadcast."""

    q_token: Any
    q_head: Any
    k_page: Any  # 0 for packed keys, which are one long page
    k_head: Any
    k_slot: Any
    v_page: Any
    v_head: Any
    v_slot: Any
    crow: Any
    col: Any
    bias_head: Any
    bias_token: Any
    bias_key: Any
    bias_width: Any  # not a stride: attn_bias.shape[2], for whose divisors kernels are compiled too
    alibi_batch: Any
    alibi_head: Any
    q_descale_batch: Any
    q_descale_head: Any
    k_descale_batch: Any
    k_descale_head: Any
    v_descale_batch: Any
    v_descale_head: Any
    k_descale_page: Any  # None unless a descale has a scale for each token; then `_batch` is None
    k_descale_slot: Any
    v_descale_page: Any
    v_descale_slot: Any
    v_descale_column: Any  # None unless it has scales for columns
    latent_token: Any
    latent_head: Any
    tail_token: Any
    tail_key: Any
    tail_width: Any  # not a stride: tail_mask.shape[1]


class Scalars(NamedTuple):
    """Numbers that depend on the options of a call."""

    num_heads: Any
    left: Any
    right: Any
    scale: Any  # softmax_scale
    factor: Any  # exp2(score * factor) is the unnormalised probability
    softcap: Any
    dropout_threshold: Any
    dropout_scale: Any
    key_rank: Any
    min_units: Any  # the fewest units of work of a program, see `work_info.py`
    page_size: Any  # None if PAGE_SIZE says it


class Sizes(NamedTuple):
    """Numbers that change from call to call, for which kernels are not compiled."""

    stride_table: Any
    stride_crow_batch: Any
    stride_crow_head: Any
    stride_col_batch: Any
    stride_col_head: Any
    total_q: Any
    max_keys: Any
    num_pages: Any
    batch: Any
    layout_rows: Any
    nnz: Any


class Options(NamedTuple):
    """Compile-time constants of a kernel."""

    HEAD_DIM: int
    K_LOW: int  # chunks of a row, see `load_kv.py`
    K_HIGH: int
    K_STEP: int
    HEAD_DIM_V: int
    V_LOW: int
    V_HIGH: int
    V_STEP: int
    OUT_LOW: int  # of chunks of a row of results, all but the last
    GROUP_SIZE: int
    PACK: int  # heads in a tile
    TOKENS: int  # queries in a tile
    GAP: int  # see `seqlen_info.py`
    IS_PAGED: bool
    # 0: packed keys, or one page for each sequence; LONG_PAGES or SHORT_PAGES: `Scalars.page_size`
    PAGE_SIZE: int
    HAS_LAYOUT: bool
    Q_BLOCK: int
    K_BLOCK: int
    LAYOUT_GROUP: int  # query heads that share a layout
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_SOFTCAP: bool
    KEY_RANKS: int  # see `key_positions.py`
    KEY_INTERLEAVE: int
    KEY_POSITION: str  # the name of a type
    IS_ALIGNED: bool  # the first key of a tile is a multiple of BLOCK_N
    HAS_DROPOUT_BASE: bool
    BIAS: str  # "", "bool" or "float"
    RAW_SCORES: bool  # scores are not scaled: `factor` contains the scale
    CHAIN: int
    FIRST_PHASE: int
    IS_SPLIT: bool
    PART_ROWS: int
    BLOCK_MERGED: int
    IS_MERGED_BY_ALL: bool  # many parts of a tile are merged by several programs
    FIXED_UNITS: int
    SEARCH_WIDTH: int
    IS_ONE_LOOK: bool
    Q_FORMAT: str
    K_FORMAT: str
    V_FORMAT: str
    OUT_FORMAT: str
    # bytes of which addresses of rows are multiples, if Triton does not see it; else 0
    K_ALIGNED: int
    V_ALIGNED: int
    IS_V_LIKE_K: bool  # k and v have the same strides, so that they share row offsets
    IS_PAIRED: bool
    K_BY_TOKEN: bool  # k_descale has a scale for each token and head: see `token_scales.py`
    V_BY_TOKEN: bool
    SCALED_COLUMNS: int  # of values, that share a scale of v_descale; 0: those of a head do
    HAS_UNITS: bool  # weights of values are in units of their own
    IS_LOADED_FIRST: bool  # a tile's keys and values are both asked for before either is used
    HAS_PTX: bool
    IS_Q_NORMED: bool
    DTYPE: str  # the name of the type of the factors of matrix products
    IS_PRECISE: bool  # float32: sums are short (see CHAIN), and functions are not approximate
    BLOCK_M: int
    BLOCK_N: int
    SKIPS: bool = False  # sequences with a negative number of keys are another launch's
