"""The groups of the backward kernel, beside those of `groups.py` that the forward has too."""

from dataclasses import dataclass
from typing import Any

from torch_paged_attn.backends.neuron.toolchain import nl

# the numbers that a row of queries has to itself: -lse, the gradient of lse, the slope
MINUS_LSE, DLSE, SLOPE = 0, 1, 2
NUM_SCALARS = 3


@dataclass
class BackwardOptions(nl.NKIObject):
    """What the backward kernel is compiled for beside `Options`; it has one KV head at a time."""

    width: int  # columns of a tile of scores: products of this many fit in PSUM
    visible_tiles: Any  # for every `width` columns, the tiles of rows that see some: LEVEL, ...
    out_scale: float  # of dq and dk
    is_shaped: bool  # scores are more than a product times a positive factor
    wants_dq: bool
    wants_dkv: bool
    wants_dbias: bool
    adds_dq: bool  # to what earlier launches have left in dq
    adds_dkv: bool
    one_item: bool  # every stack has a single item
    one_product: bool  # of `width` columns, which all its tiles see


# entries of `visible_tiles` for a tile of rows: its place in the stack, how many columns it sees at
# most, and whether the first, or the last of them are hidden from some row
LEVEL, COLUMNS, HIDES_FIRST, HIDES_LAST = 0, 1, 2, 3


@dataclass
class BackwardTensors(nl.NKIObject):
    """The tensors in HBM that an item reads and writes."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    q: Any
    k: Any
    v: Any
    dout: Any
    out: Any
    indices: Any
    bounds: Any
    positions: Any
    row_scalars: Any
    bias: Any


@dataclass
class BackwardStack(nl.NKIObject):
    """What a stack of query tiles keeps from item to item."""

    q: Any  # (P, depth, head_dim); or one tile more, the identity: see `begin_and_turn`
    dout: Any  # (P, depth, head_dim_v)
    out: Any  # (P, depth, head_dim_v)
    scalars: Any  # (P, depth, NUM_SCALARS)
    # (head_dim or P, head_dim / P, depth, P) transposed: sums in float32, or with `one_product`
    # what is stored, which may be rows: (P, depth, head_dim)
    dq: Any
    prior: Any  # (P, head_dim or head_dim_v) float32: what earlier launches left, if they add up
    exact: Any  # (P, P) the identity in float32


@dataclass
class Transposed(nl.NKIObject):
    """What the products contract over head_dim, which lies on the partitions here; rows' deltas."""

    q: Any  # (P, head_dim / P, depth, P)
    dout: Any  # (P, head_dim_v / P, depth, P)
    k: Any  # (P, head_dim / P, tile_k)
    v: Any  # (P, head_dim_v / P, tile_k)
    delta: Any  # (P, depth) float32: dout . out - dlse of each row


@dataclass
class TokenSums(nl.NKIObject):
    """Sums for `width` keys in PSUM, float32: of dk, or of dv."""

    sums: Any  # rows (P, width / P, dim or more); transposed (dim or P, dim / P, width)
    as_rows: bool
    together: int  # of rows, how many P an instruction reads
