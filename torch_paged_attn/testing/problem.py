"""`Problem`: one attention call described by plain numbers. `inputs.build` makes its tensors."""

import dataclasses
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Layout:
    """A random block-sparse layout in which a block is listed with probability `density`.

    heads: "one", "kv" or "all": the layout has 1, num_kv_heads or num_heads heads
    batched: whether each sequence has a layout of its own
    """

    q_block_size: int = 64
    k_block_size: int = 64
    heads: str = "one"
    batched: bool = False
    density: float = 0.5


@dataclasses.dataclass(frozen=True)
class Selected:
    """Random lists of selected units for each query token.

    units: entries of a list, K; "all": each list names every unit of its sequence
    size: select_size
    heads: "one" or "kv": G is 1 or num_kv_heads
    holes: share of the entries that are -1
    counted: whether num_selected is given; entries behind it are valid units that must not count
    past: whether lists also name units past Lk
    slots: whether units of the cache are named, without block_table
    own: whether the unit of the token's own position is always listed, first
    """

    units: int | str = 8
    size: int = 1
    heads: str = "one"
    holes: float = 0.0
    counted: bool = False
    past: bool = False
    slots: bool = False
    own: bool = False


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention call. Fields that are named like an argument mean that argument.

    seqs: for each sequence (query_len, context_len), which are Lq and Lk - Lq
    """

    name: str
    seqs: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None  # uint8: int4, two numbers a byte
    out_dtype: torch.dtype | None = None
    out_scale: bool = False
    page_size: int | None = None  # None: packed keys and values
    # "hnd" (num_pages, num_kv_heads, page_size, head_dim), "nhd" the same transposed from
    # (num_pages, page_size, num_kv_heads, head_dim), "interleaved" pages of k and v by turns,
    # "packed_last" v behind k in the last dimension, "mla" v is the first columns of k; "rows" with
    # descale "tokens": k, its scale, v, its scale behind one another for each token and head
    cache_layout: str = "hnd"
    spare_pages: int = 2  # pages that no sequence uses
    page_seed: int = 0  # of the order of the pages
    # the argument that gives the key lengths, "seqused_k" or "cu_seqlens_k"; packed keys also
    # "none": they are cut by cu_seqlens_q
    lengths: str = "seqused_k"
    padding_rows: int = 0  # rows of q after the last sequence
    fused_qkv: bool = False  # whether q is a slice of a wider tensor
    causal: bool = True
    window_size_left: int = -1
    window_size_right: int = -1
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: str = ""  # "heads" or "batch"
    bias: str = ""  # "float" or "bool"
    bias_heads: str = "one"  # or "all"
    sinks: bool = False
    # "scalar", "heads", "batch", "tokens", or "columns": of v alone, 128 of each token
    descale: str = ""
    dropout_p: float = 0.0
    dropout_base: tuple[int, int, int] | None = None  # head, row, column: rng_state[2:]
    deterministic: bool = True
    layout: Layout | None = None
    latent: bool = False  # whether q_latent is given
    v_dtype: torch.dtype | None = None  # with q_latent, v may have a dtype of its own
    tail: bool = False  # whether tail_mask is given
    k_ranges: str = ""  # packed keys with k_start: "apart", or "shared" rows
    q_positions: tuple[int, ...] | None = None
    batch_invariant: bool = False
    key_ranks: int = 1
    key_rank: int = 0
    key_interleave: int = 1
    selected: Selected | None = None
    seed: int = 0

    @property
    def op(self) -> str:
        """The operator's name."""
        if self.selected is not None:
            return "selected_attention"
        return "flash_varlen" if self.layout is None else "blocksparse"

    @property
    def query_lens(self) -> list[int]:
        """Lq of each sequence."""
        return [query_len for query_len, _ in self.seqs]

    @property
    def key_lens(self) -> list[int]:
        """Lk of each sequence."""
        return [query_len + context_len for query_len, context_len in self.seqs]

    @property
    def optional(self) -> frozenset[str]:
        """Which arguments of `ops.lacking.OPTIONAL`, which a backend need not support, it gives."""
        uses = {
            "q_latent": self.latent,
            "tail_mask": self.tail,
            "k_start": bool(self.k_ranges),
            "q_position": self.q_positions is not None,
            "batch_invariant": self.batch_invariant,
            "key_ranks": self.key_ranks > 1,
            "key_rank": self.key_rank > 0,
            "key_interleave": self.key_interleave > 1,
            "rng_state[2:]": self.dropout_base is not None,
            "k_descale by token": self.descale == "tokens",
            "v_descale by token": self.descale == "tokens",
            "v_descale by column": self.descale == "columns",
            "k in int4": self.kv_dtype == torch.uint8,
            "v in int4": (self.v_dtype or self.kv_dtype) == torch.uint8,
        }
        names = frozenset(name for name, is_used in uses.items() if is_used)
        # what a backend lacks may be of some ops alone
        op = "selected" if self.selected is not None else self.op
        return names | {f"{name} of {op}" for name in names}


def optional_tensors(problem: Problem, total_q: int) -> dict[str, Any]:
    """The tensors of `Problem.optional`; k_start is made with the keys. They have a generator of
    their own, so that they do not change the other tensors.
    """
    g = torch.Generator().manual_seed(problem.seed + 1)
    args: dict[str, Tensor] = {}
    if problem.latent:
        head_dim_v = problem.head_dim_v or problem.head_dim
        latent = torch.randn(total_q, problem.num_heads, head_dim_v, generator=g)
        latent[sum(problem.query_lens) :] = float("nan")
        args["q_latent"] = latent.to(problem.dtype)
    if problem.tail:
        widest = max([*problem.query_lens, 0])
        args["tail_mask"] = torch.rand(total_q, widest + 2, generator=g) < 0.6
    if problem.q_positions is not None:
        args["q_position"] = torch.tensor(problem.q_positions, dtype=torch.int32)
    return args
