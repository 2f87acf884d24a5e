"""The number formats of a call: of the stored tensors, and of the matrix products."""

import dataclasses

import torch
import triton.language as tl

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.dequant import PAIRED, stored_format
from torch_paged_attn.backends.triton.runtime.target import Target


def product_type(q_dtype: torch.dtype, is_paired: bool, target: Target) -> tl.dtype:
    """The type of the matrix products: q's, or float16 if k and v are decoded by pairs, because
    float16 represents every 8-bit number exactly.
    """
    if is_paired:
        return tl.float16
    if q_dtype == torch.float32 or (q_dtype == torch.bfloat16 and not target.converts_bfloat16):
        return tl.float32
    return tl.bfloat16 if q_dtype == torch.bfloat16 else tl.float16


@dataclasses.dataclass(frozen=True)
class Formats:
    """The formats of `dequant.py` for the tensors of a call, and the type of its products."""

    product: tl.dtype
    q: str
    k: str
    v: str
    out: str
    is_paired: bool
    is_q_normed: bool  # rows of q are scaled to float16's range

    @property
    def is_precise(self) -> bool:
        """Whether products are in float32."""
        return self.product == tl.float32


def formats_of(call: AttentionCall, target: Target, is_paired: bool) -> Formats:
    """The formats of a call. `is_paired`: 8-bit keys and values are decoded by pairs."""
    dtype = product_type(call.q.dtype, is_paired, target)
    return Formats(
        product=dtype,
        q=stored_format(call.q.dtype, target),
        k=PAIRED[call.k.dtype] if is_paired else stored_format(call.k.dtype, target),
        v=PAIRED[call.v.dtype] if is_paired else stored_format(call.v.dtype, target),
        out=stored_format(call.result_dtype, target),
        is_paired=is_paired,
        is_q_normed=dtype == tl.float16 and call.q.dtype == torch.bfloat16,
    )
