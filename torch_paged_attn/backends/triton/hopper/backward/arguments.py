"""The groups of arguments that the kernels of the backward take, as the host fills them.

As in `forward/arguments.py`: options and scalars follow from the description of a call and its
tiles, sizes differ from call to call, pointers and tensor maps are its memory.
"""

from typing import Any, NamedTuple


class BackwardPointers(NamedTuple):
    cu_seqlens_q: Any
    tile_list: Any  # of `tile_scheduler.plan_tile_list`
    statistics: Any  # of `common/backward_preprocess.py`
    dq_sums: Any  # float32, zeros when the kernel starts; None but in one pass
    alibi_slopes: Any


class BackwardSizes(NamedTuple):
    batch: int
    statistics_tiles: int  # of a head


class BackwardScalars(NamedTuple):
    heads: int  # of the units of work: query heads for tiles of queries, KV heads for those of keys
    stride_alibi_batch: int
    stride_alibi_head: int
    window_left: int  # 0 where it hides nothing
    window_right: int
    # scores are q . k or, with a softcap, tanh(x) with x = softmax_scale * q . k / softcap
    scale_log2: float  # logits in base two are scores times this
    softcap_scale_log2: float  # exp(2 x) is two to the power of q . k times this
    alibi_scale: float  # what scores get of a slope is the slope times this
    scale: float  # softmax_scale: dq and dk are the sums of products times this


class BackwardOptions(NamedTuple):
    """What a kernel is compiled for.

    The tile that stays has TILE rows, of keys or of queries; those that pass by have PASS rows.
    """

    TILE: int
    STAY: int  # rows of TILE that a consumer computes
    PASS: int
    IS_SPLIT: bool  # consumers compute all rows, and half of the columns of results each
    WIDTH: int  # head_dim as it lies in shared memory
    WIDTH_V: int
    COLUMNS: int  # of WIDTH, those that hold numbers and are multiplied
    GROUP_SIZE: int
    HAS_LEFT: bool
    HAS_RIGHT: bool  # also where a call is causal
    IS_CAUSAL: bool
    HAS_SOFTCAP: bool
    IS_APART: bool  # tiles of which all keys exist have instructions of their own, without masks
    IN_PLACE: bool  # dQ is stored from the shared memory where the queries lay
    DQ_SUMS: int  # how one pass adds dQ up in memory: see `sums.py`
    CONSUMERS: int
    STAY_STAGES: int  # tiles that stay for which there is room: 2 to load the next one ahead
    FIRST_STAGES: int  # of tiles that pass: of queries or keys, which are needed for longer,
    SECOND_STAGES: int  # and of gradients of the result, or of values
    DS_STAGES: int  # tiles of P and dS in shared memory: where IS_SPLIT, and of dS in one pass
    SLOTS: int  # a consumer's buffers for parts of dQ, BY_BOX
    REGISTERS: int  # of a consumer's thread
    # how many of the two tiles that stay are kept in registers: first values or gradients of the
    # result, then keys or queries
    OPERANDS: int
    AT_ONCE: bool  # all products of a tile are asked for together: `dkdv.py`


class BackwardParams(NamedTuple):
    q_desc: Any
    dout_desc: Any
    k_desc: Any
    v_desc: Any
    statistics_desc: Any  # of tiles of keys only
    first_desc: Any  # of the first result: dk, or dq
    second_desc: Any  # of dv, if the tiles are of keys
    sums_desc: Any  # of dq_sums, if the tensor memory accelerator adds them up
    pointers: BackwardPointers
    sizes: BackwardSizes
    scalars: BackwardScalars
