"""The arguments of an attention call by name: what checks, reference and backends pass on."""

import dataclasses
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(slots=True, eq=False)
class BlockLayout:
    """A block-sparse mask in CSR: rows are blocks of query positions, columns blocks of keys."""

    crow_indices: Tensor  # ([batch,] H, rows + 1) int32
    col_indices: Tensor  # ([batch,] H, nnz) int32
    q_block_size: int = 64
    k_block_size: int = 64


@dataclasses.dataclass(slots=True, eq=False)
class AttentionCall:
    """One call of `flash_varlen` or `blocksparse`; the fields mean what `ops.flash_varlen` says."""

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None
    attn_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    out_scale: Tensor | None = None
    rng_state: Tensor | None = None
    _: dataclasses.KW_ONLY
    softmax_scale: float | None = None
    causal: bool = False
    window_size_left: int = -1
    window_size_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    out_dtype: torch.dtype | None = None
    layout: BlockLayout | None = None

    @classmethod
    def flash_varlen(cls, *args: Any, **kwargs: Any) -> "AttentionCall":
        """From what the operator `flash_varlen` was called with."""
        return cls("flash_varlen", *args, **kwargs)

    @classmethod
    def blocksparse(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        crow_indices: Tensor,
        col_indices: Tensor,
        *args: Any,
        q_block_size: int = 64,
        k_block_size: int = 64,
        causal: bool = True,
        **kwargs: Any,
    ) -> "AttentionCall":
        """From what the operator `blocksparse` was called with."""
        layout = BlockLayout(crow_indices, col_indices, q_block_size, k_block_size)
        return cls("blocksparse", q, k, v, *args, causal=causal, layout=layout, **kwargs)

    @property
    def total_q(self) -> int:
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[-1]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def group_size(self) -> int:
        """Query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def page_size(self) -> int:
        """0 where keys are packed."""
        return 0 if self.block_table is None else self.k.shape[2]

    @property
    def scale(self) -> float:
        """The factor of `q . k`."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def window_right(self) -> int:
        """Keys seen after a query's position, under `causal` too; -1 is unbounded."""
        return 0 if self.causal else self.window_size_right

    @property
    def result_dtype(self) -> torch.dtype:
        return self.out_dtype or self.q.dtype

    def new_results(self) -> tuple[Tensor, Tensor]:
        """Memory for `out` and `softmax_lse`, contiguous."""
        shape = (self.total_q, self.num_heads, self.head_dim_v)
        out = self.q.new_empty(shape, dtype=self.result_dtype)
        return out, self.q.new_empty((self.num_heads, self.total_q), dtype=torch.float32)


def key_lengths(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None
) -> Tensor:
    """Lk of every sequence, int32 `(batch,)`, wherever the call says it."""
    if seqused_k is not None:
        return seqused_k
    return (cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k).diff()
