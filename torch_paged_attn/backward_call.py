"""Stand-in until core's is on main."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall

FLASH = ("dout", "dlse", "q", "k", "v", "out", "softmax_lse")
BLOCK = ("dout", "dlse", "q", "k", "v", "crow_indices", "col_indices", "out", "softmax_lse")
REST = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "seqused_k",
    "attn_bias",
    "alibi_slopes",
    "sinks",
    "rng_state",
)


@dataclasses.dataclass(slots=True, eq=False)
class BackwardCall:
    forward: AttentionCall
    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    softmax_lse: Tensor
    deterministic: bool = True
    output_mask: tuple[bool, ...] = (True,) * 5

    @classmethod
    def _of(cls, names, make, args, kwargs):
        given = dict(zip((*names, *REST), args)) | kwargs
        own = {n: given.pop(n) for n in ("dout", "dlse", "out", "softmax_lse")}
        own |= {n: given.pop(n) for n in ("deterministic", "output_mask") if n in given}
        return cls(forward=make(**given), **own)

    @classmethod
    def flash_varlen(cls, *args: Any, **kwargs: Any) -> "BackwardCall":
        return cls._of(FLASH, AttentionCall.flash_varlen, args, kwargs)

    @classmethod
    def blocksparse(cls, *args: Any, **kwargs: Any) -> "BackwardCall":
        return cls._of(BLOCK, AttentionCall.blocksparse, args, kwargs)

    def new_results(self):
        f = self.forward
        like = (f.q, f.k, f.v, f.attn_bias, f.sinks)
        found = []
        for i, (x, wanted) in enumerate(zip(like, self.output_mask)):
            if x is None or not wanted or (i == 3 and x.dtype == torch.bool):
                found.append(f.q.new_empty(0))
            else:
                found.append(torch.empty(x.shape, dtype=x.dtype, device=x.device))
        return tuple(found)
