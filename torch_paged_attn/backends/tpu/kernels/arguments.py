"""What the attention kernel is given: its refs by name, and what it is compiled for."""

import dataclasses
from typing import TYPE_CHECKING, Any, Self

from torch_paged_attn.backends.tpu.tiles import KeyTiles, Tiles, Window

if TYPE_CHECKING:
    from torch_paged_attn.backends.tpu.tile_sizes import Config

# heads that are computed on together, and their rows, at most: the latencies of heads hide one
# another, and their scores lie in VMEM together
MOST_HEADS = 8
MOST_ROWS = 4096

# numbers of 32 bits in the scalar core's memory, without what the compiler keeps there: spilled
# registers, the grid's indices
MOST_WORDS = (1 << 18) - (1 << 13)


@dataclasses.dataclass(frozen=True)
class Options:
    """What a kernel is compiled for, besides shapes."""

    tile_q: int  # tokens of a tile, a power of two
    group_size: int  # query heads of a KV head, or of all KV heads that are stacked
    stack: int  # KV heads whose rows are stacked
    block_k: int  # keys of a block: loaded together
    step_k: int  # keys that are computed on together where every row sees all of them
    masked_step_k: int  # and where not: `step_k`, or what is left of it by halving
    config: "Config"  # the sizes asked for, the chip's memory and cores
    softmax_scale: float
    softcap: float  # 0 for none
    window: Window
    dropout_p: float
    block_sizes: tuple[int, int]  # of a layout: query tokens and keys of one of its blocks
    compute_dtype: Any  # of what products are computed on
    out_dtype: Any  # of the kernel's results: bfloat16 or float32
    interpret: Any  # Pallas' `interpret`: False compiles
    first_head: int = 0  # the launch's first query head among the call's
    first_kv_head: int = 0  # and its first KV head among those of the pages
    fold: int = 1  # keys of a row of `k_buffers`
    table_stride: int = 0  # entries of each sequence in the table; `table_start` has others
    # of the forward (`q_out_dma.py`)
    least_queries: int = 1  # of the sequences that the launch is for
    most_queries: int = 2**30
    clears_padding: bool = False
    layout_shape: tuple[int, int, int] = (0, 0, 0)  # rows, blocks, heads of the layout's words
    # rows of the layout in which the launch's tiles begin; None is no bound
    layout_rows: tuple[int | None, int | None] = (None, None)
    layouts_of_head: int = 0  # of each head of the kernel; 0: all have the same one

    def most_tiles(self, total_q: int, batch: int) -> int:
        """Of a launch, a multiple of its cores: a sequence's last tile may be one in part."""
        longest, num_cores = min(self.most_queries, total_q), self.config.num_cores
        bound = (total_q + batch * (self.tile_q - 1)) // self.tile_q
        bound = min(batch if longest <= self.tile_q else bound, total_q)
        bound = min(bound, total_q // self.least_queries + 1)
        return max(1, -(-bound // num_cores)) * num_cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs:
    """The memory of a kernel, and what all three kernels have; None is what a call does not have.
    Sizes: `launch.py`.
    """

    tiles: Tiles  # tables, in SMEM
    slopes: Any = None  # (1, num_kv_heads, rows, 1), in base 2, as are sinks and biases
    # (1 or num_heads, tokens, keys), of the backward (num_tiles, 1 or num_kv_heads, rows, keys)
    bias: Any = None
    rng: Any = None  # the seed's low and high word, and the offset
    # scratch
    bias_buffers: Any = None  # (num_buffers, 1 or num_kv_heads, rows, block_k)
    # of the forward: (1 or num_heads, tile_q, block_k), of one token (1, 1 or all rows, block_k)
    bias_rows: Any = None
    # (n, num_buffers): of keys, of values, of biases, of scales; or of what `dkdv` has
    semaphores: Any
    cursor: Any  # where the loader stands between two tiles

    @classmethod
    def named(cls, names: tuple[str, ...], refs: tuple[Any, ...]) -> Self:
        """From refs in the order of a launch; the fields of tiles are refs of their own."""
        given: dict[str, Any] = dict(zip(names, refs, strict=True))
        given["tiles"] = Tiles(*(given.pop(name) for name in Tiles._fields))
        if keys := [given.pop(name) for name in names if name.startswith("keys_")]:
            given["key_tiles"] = KeyTiles(*keys)
        return cls(**given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvRefs(Refs):
    """Of kernels that keys pass by (`kv_pipeline.py`)."""

    table_start: Any = None  # (batch,) first entry of each sequence, if they have different numbers
    table: Any  # page ids, flat, with what a block reads behind the last entry
    visits: Any = None  # (num_tiles * n,) the blocks of each tile; None for all of them
    num_visits: Any = None  # (num_tiles,)
    k_hbm: Any  # (num_pages, num_kv_heads, page_size, head_dim)
    v_hbm: Any = None
    k_buffers: Any  # (num_buffers, pages, num_kv_heads, page_size, head_dim)
    v_buffers: Any = None  # the same of values; None where they are the first numbers of keys
    q: Any  # (1, num_kv_heads, rows, head_dim)

    def __post_init__(self) -> None:
        if self.v_hbm is None and self.v_buffers is not None:  # keys and values are one array
            whole = self.k_hbm
            object.__setattr__(self, "k_hbm", whole.at[0])
            object.__setattr__(self, "v_hbm", whole.at[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardRefs(KvRefs):
    """Of the attention kernel: tables, inputs, outputs, scratch."""

    score_scale: Any = None  # (batch * num_kv_heads,)
    out_factor: Any = None  # (batch * num_kv_heads,)
    # scales by token: those of keys, then those of values (`kv_pipeline.py`)
    scale_start: Any = None  # (batch,) where each sequence's begin
    token_scales: Any = None  # (pages of LANES keys, 2, num_kv_heads, LANES), in HBM
    scale_buffers: Any = None  # (num_buffers, block_k // LANES, 2, num_kv_heads, LANES)
    sinks: Any = None  # (1, num_kv_heads, rows, 1)
    # state of `softmax.py`: maxima and sums (num_kv_heads, rows, LANES), sums of values
    m_i: Any
    l_i: Any
    acc: Any  # (num_kv_heads, rows, head_dim_v)

    cu_seqlens: Any  # (batch + 1,)
    key_lens: Any  # (batch,)
    num_tiles: Any  # (1,)
    slope_table: Any = None  # (batch * num_heads,), if sequences have slopes of their own
    layout_words: Any = None  # (layouts * (rows + 1) * blocks * heads,)
    layout_union: Any = None  # (layouts * (rows + 1) * blocks,) of all heads, if there are several
    q_hbm: Any  # (total_q, num_heads, head_dim), of tiles of one token heads as in `q`
    # (head_dim // LANES, tile_q, num_heads, LANES), of one token (1, kv, rows, head_dim)
    q_tokens: Any
    out_hbm: Any  # as `q_hbm`
    out_tokens: Any  # as `q_tokens`
    lse_hbm: Any  # (total_q, 1, LANES), in base 2, a lane for a head
    lse_tokens: Any  # (tile_q, 1, LANES)
    earlier_out: Any = None  # the memory of `out_hbm` and `lse_hbm`, written by an earlier launch
    earlier_lse: Any = None
    lse_rows: Any  # (rows, LANES) of the heads, each in its lane
    token_semaphores: Any  # of queries, of out, of lse


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryGradientRefs(KvRefs):
    """Of the kernel of dq: inputs and outputs of a tile, scratch."""

    dout: Any  # (1, num_kv_heads, rows, head_dim_v)
    statistics: Any  # (1, 2 * num_kv_heads, rows): base-2 lse of the heads, then delta
    dq: Any  # (1, num_kv_heads, rows, head_dim)
    dq_acc: Any
    columns: Any  # (2 * num_kv_heads, rows, LANES): the statistics, all lanes alike
    zeros: Any = None  # the memory of dbias
    dbias: Any = None  # (num_tiles, 1 or num_kv_heads, rows, keys), in HBM
    dbias_buffer: Any = None  # (1 or num_kv_heads, rows, block_k)
    dbias_done: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyGradientRefs(Refs):
    """Of the kernel of dk and dv: tables, inputs and outputs of a tile, what passes by, scratch."""

    key_tiles: KeyTiles
    k: Any  # (1, num_kv_heads, block_k, head_dim)
    v: Any
    dk: Any
    dv: Any
    q_hbm: Any  # (num_query_tiles, num_kv_heads, rows, head_dim)
    dout_hbm: Any
    statistics_hbm: Any  # (num_query_tiles, 2 * num_kv_heads, rows)
    q_buffers: Any  # the same of num_buffers tiles
    dout_buffers: Any
    statistics_buffers: Any
    dk_acc: Any  # (num_kv_heads, block_k, head_dim)
    dv_acc: Any
