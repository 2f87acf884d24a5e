"""The groups of arguments that the kernels of the backward take, as the host fills them.

As in `arguments.py`: options and scalars follow from the description of a call and its tiles, sizes
differ from call to call, pointers and tensor maps are its memory.
"""

from typing import Any, NamedTuple


class BackwardPointers(NamedTuple):
    """Memory reached by address; None where a call has no such tensor."""

    cu_seqlens_q: Any
    tile_list: Any  # of `tile_scheduler.plan_tile_list`
    statistics: Any  # of `backward_statistics.py`
    dq_sums: Any  # float32, zeros when the kernel starts: one pass only
    alibi_slopes: Any


class BackwardSizes(NamedTuple):
    """Numbers that differ from call to call of one model."""

    batch: int
    statistics_tiles: int  # of a head


class BackwardScalars(NamedTuple):
    """Numbers that follow from the description of a call and its tiles."""

    heads: int  # of the units of work: query heads for tiles of queries, KV heads for those of keys
    stride_alibi_batch: int
    stride_alibi_head: int
    window_left: int  # 0 where it hides nothing
    window_right: int
    scale_log2: float  # from the units of scores to exponents of two
    softcap_scale_log2: float  # twice the factor of what softcap takes the tanh of, in base two
    alibi_scale: float  # from logits to the units of scores
    scale: float  # of q . k: from the sums of products to dq and dk


class BackwardOptions(NamedTuple):
    """What a kernel is compiled for.

    The tile that stays has TILE rows, of keys or of queries; those that pass by have PASS rows.
    """

    TILE: int
    STAY: int  # rows of a consumer: all of them where consumers share out the columns of results
    PASS: int
    IS_SPLIT: bool  # whether they do
    WIDTH: int  # head_dim as it lies in shared memory
    WIDTH_V: int
    COLUMNS: int  # of WIDTH, those that products over it take
    GROUP_SIZE: int
    HAS_LEFT: bool
    HAS_RIGHT: bool  # also where a call is causal
    IS_CAUSAL: bool
    HAS_SOFTCAP: bool
    IS_APART: bool  # tiles of which all keys exist have instructions of their own, without masks
    IN_PLACE: bool  # results of tiles of queries leave from where the queries lay
    DQ_SUMS: int  # how dQ is added up in memory: see `sums.py`
    CONSUMERS: int
    STAY_STAGES: int
    FIRST_STAGES: int  # of tiles that pass: of queries or keys, which are needed for longer,
    SECOND_STAGES: int  # and of gradients or values
    DS_STAGES: int  # of dS on its way between consumers: one pass only
    SLOTS: int  # of a consumer for dQ on its way out: where a warp of its own adds it up
    REGISTERS: int  # of a consumer's thread
    OPERANDS: int  # of the two tiles that stay, how many are kept in registers
    AT_ONCE: bool  # all products of a tile of keys are asked for together


class BackwardParams(NamedTuple):
    """All that the host passes, as the warps of a program share it."""

    q_desc: Any
    dout_desc: Any
    k_desc: Any
    v_desc: Any
    statistics_desc: Any  # of tiles of keys only
    first_desc: Any  # of results: dk, or dq
    second_desc: Any  # dv, if the tiles are of keys
    sums_desc: Any  # of dq_sums, if the tensor memory accelerator adds them up
    pointers: BackwardPointers
    sizes: BackwardSizes
    scalars: BackwardScalars
