"""The groups of arguments of the kernel of gradients of units of keys."""

from typing import Any, NamedTuple


class UnitGradientPointers(NamedTuple):
    """Memory reached by address."""

    bounds: Any  # these three: of `inverse_lists.InverseLists`
    tokens: Any
    places: Any
    first_rows: Any  # these three: of `NumberedEntries`
    first_units: Any
    lengths: Any
    parts: Any  # (entries, group_size, head_dim) float16
    part_scales: Any  # (entries, group_size, consumers) float32
    dk: Any  # (total_k, num_kv_heads, head_dim), contiguous
    dv: Any


class UnitGradientSizes(NamedTuple):
    """Numbers that change from call to call."""

    num_rows: Any  # of k
    listed: Any  # entries of the inverse lists of a group
    units: Any  # of which a group has inverse lists
    runs: Any  # of tokens
    run: Any
    first_place: Any  # of the entries of the run
    head_places: Any  # entries of a KV head that have parts
    own_lists: Any  # 0 if all KV heads share lists, else 1


class UnitGradientScalars(NamedTuple):
    """Numbers that follow from the description of a call."""

    scale_log2: float
    scale: float


class UnitGradientOptions(NamedTuple):
    """What the kernel is compiled for."""

    BLOCK_N: int  # keys of a unit
    WIDTH: int
    WIDTH_V: int
    GROUP_SIZE: int
    TOKENS: int  # of a tile of queries
    HAS_LEFT: bool
    HAS_RIGHT: bool
    ARE_SUMS: bool  # dk and dv have the float32 sums of the runs before
    STAGES: int
    CONSUMERS: int
    PRODUCERS: int
    REGISTERS: int  # of a consumer's thread


class UnitGradientParams(NamedTuple):
    """All that the host passes, as the warps of a program share it."""

    q_desc: Any
    dout_desc: Any
    k_desc: Any
    v_desc: Any
    statistics_desc: Any
    pointers: UnitGradientPointers
    sizes: UnitGradientSizes
    scalars: UnitGradientScalars
