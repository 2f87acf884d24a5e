"""What the attention kernel is given: its refs by name, and what it is compiled for."""

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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


# memory that not every kernel and call has, and which is then None
OPTIONAL = (
    *("slopes", "slope_table", "sinks", "bias", "bias_rows", "layout_words", "layout_union"),
    *("score_scale", "out_factor", "token_scales", "table_start", "visits", "v_hbm", "v_buffers"),
    "dbias",
)


class Refs(SimpleNamespace):
    """The memory of a kernel, by the names under which its launch allocates it (`launch.py`,
    `attention_gradients.py`: what it is, and its shape).
    """

    @classmethod
    def named(cls, names: tuple[str, ...], refs: tuple[Any, ...]) -> "Refs":
        """From refs in the order of a launch; the fields of tiles are refs of their own."""
        given: dict[str, Any] = dict.fromkeys(OPTIONAL) | dict(zip(names, refs, strict=True))
        given["tiles"] = Tiles(*(given.pop(name) for name in Tiles._fields))
        if keys := [given.pop(name) for name in names if name.startswith("keys_")]:
            given["key_tiles"] = KeyTiles(*keys)
        if given["v_hbm"] is None and given["v_buffers"] is not None:
            whole = given["k_hbm"]  # keys and values as one array
            given |= {"k_hbm": whole.at[0], "v_hbm": whole.at[1]}
        return cls(**given)
