"""D of each query row, `rowsum(dout * out) - dlse`, for the backward of `selected_attention`."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.common.dequant import as_stored, decode
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import cdiv, next_power_of_2, target_of
from torch_paged_attn.backward_call import BackwardCall

# numbers of rows that a program multiplies
AT_ONCE = 4096


class DeltaPointers(NamedTuple):
    """Inputs, and the result `(num_heads, total_q)`."""

    dout: Any
    out: Any
    lse: Any
    dlse: Any
    d: Any


class DeltaStrides(NamedTuple):
    """Strides in elements; 0 without dlse."""

    dout_token: int
    dout_head: int
    out_token: int
    out_head: int
    dlse_head: int
    dlse_token: int


@triton.jit(do_not_specialize=("total_q",))
def _deltas_kernel(
    pointers, total_q, strides, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of a head. A row that sees no key has 0, whatever its dout is."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    at = head * total_q + row
    lse = tl.load(pointers.lse + at, mask=row < total_q, other=float("-inf"))
    sees = lse > float("-inf")
    dims = tl.arange(0, WIDTH)[None, :]
    inside = sees[:, None] & (dims < HEAD_DIM_V)
    dout = row * strides.dout_token + head * strides.dout_head
    dout = tl.load(pointers.dout + dout[:, None] + dims, mask=inside, other=0)
    out = row * strides.out_token + head * strides.out_head
    out = tl.load(pointers.out + out[:, None] + dims, mask=inside, other=0)
    out = decode(out, FORMAT, tl.float32)
    # a row that sees only a sink has out 0, and its dout may be NaN
    d = tl.sum(tl.where(out == 0.0, 0.0, decode(dout, FORMAT, tl.float32) * out), 1)
    if pointers.dlse is not None:
        dlse = row * strides.dlse_token + head * strides.dlse_head
        d -= tl.load(pointers.dlse + dlse, mask=sees, other=0.0)
    tl.store(pointers.d + at, tl.where(sees, d, 0.0), mask=row < total_q)


def deltas_of(call: BackwardCall, dout: Tensor, lse: Tensor) -> Tensor:
    """D `(num_heads, total_q)` float32. dout: with rows of contiguous numbers; lse: contiguous."""
    heads, total_q = lse.shape
    target, width = target_of(dout.device), dout.shape[-1]
    d = torch.empty_like(lse)
    out = call.out if call.out.stride(-1) == 1 else call.out.contiguous()
    stored, format_ = as_stored(dout, target)
    rows = max(AT_ONCE // next_power_of_2(width), 1)
    Launch(
        _deltas_kernel,
        (cdiv(total_q, rows), heads),
        total_q=total_q,
        strides=DeltaStrides(
            *dout.stride()[:2],
            *out.stride()[:2],
            *((0, 0) if call.dlse is None else call.dlse.stride()),
        ),
        HEAD_DIM_V=width,
        WIDTH=next_power_of_2(width),
        ROWS=rows,
        FORMAT=format_,
        num_warps=4,
    )(DeltaPointers(stored, as_stored(out, target)[0], lse, call.dlse, d))
    return d
