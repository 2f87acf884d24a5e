"""FlashAttention-4's backward, as build.py compiled it. Lies beside the library.

What `_flash_attn_bwd` of flash_attn/cute/interface.py does for sequences of one length: buffers of
whole tiles, a kernel that prepares them, the main one, and kernels that round float32 sums.
"""

import ctypes
import json
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from torch import Tensor

_library: Any = None
_cases: dict[str, dict[str, Any]] = {}


def load(path: str) -> None:
    """The library; torch has loaded the CUDA runtime that it takes its symbols from."""
    global _library
    if torch.version.cuda:
        major = torch.version.cuda.split(".")[0]
        ctypes.CDLL(f"libcudart.so.{major}", mode=ctypes.RTLD_GLOBAL)
    _library = tvm_ffi.load_module(path)
    _cases.update(json.loads(Path(path).with_suffix(".json").read_text()))


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of contiguous bfloat16 q, out, dout (batch, length, heads, dim), k and v
    (batch, length, heads_kv, dim) and float32 lse (batch, heads, length); KeyError for head
    dimensions and groups that were not compiled."""
    batch, length, heads, dim = q.shape
    heads_kv, dim_v = v.shape[2:]
    group = heads // heads_kv
    case = _cases[f"{dim}/{dim_v} {group} {'causal' if causal else 'full'}"]
    preprocess, main = (_library[case[name][0]] for name in ("preprocess", "main"))
    scale = dim**-0.5

    def buffer(make: Any, heads: int, length: int, width: int = 1) -> Tensor:
        return make(batch, heads, length * width, dtype=torch.float32, device=q.device)

    rows, keys = round_up(length, case["tile_m"]), round_up(k.shape[1], case["tile_n"])
    width, width_v = (round_up(n, case["dim_multiple"]) for n in (dim, dim_v))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dq_sum = buffer(torch.empty, heads, rows, width)  # zeroed by `preprocess`
    delta, lse_log2 = (buffer(torch.empty, heads, rows) for _ in range(2))
    # heads of a group add to one dk and dv
    sums = [dk, dv]
    if group > 1:
        sums = [buffer(torch.zeros, heads_kv, keys, n) for n in (width, width_v)]

    preprocess(
        *(out, dout, delta, lse, lse_log2, dq_sum, None, None, None, None, None),
        *(1.0, None, None),
    )
    main(
        *(q, k, v, dout, lse_log2, delta, dq_sum, *sums, scale, None, None, None, None, None),
        *(None, None, None, None, (None, None), None, None),
    )
    rounded = [(dq_sum, dq, scale)]
    if group > 1:
        rounded += [(sums[0], dk, scale), (sums[1], dv, 1.0)]
    for name, (total, gradient, factor) in zip(case["postprocess"], rounded, strict=True):
        _library[name](total, gradient, factor, None, None, None, None)
    return dq, dk, dv
