"""`Call`s run by run_call.cpp. What attention_guard.cpp makes of the arguments is made here."""

import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_paged_attn.testing.inputs import Call

# as in csrc/core/attention.h
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.int8, torch.bool, torch.int32, torch.int64]


class Memory:
    """Tensors laid out one behind the other, with their gaps."""

    def __init__(self) -> None:
        self.bytes = bytearray(64)

    def add(self, t: Tensor) -> int:
        """Copy what `t` spans and return where it lies."""
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        flat = t.as_strided((span if t.numel() else 0,), (1,))
        offset = len(self.bytes)
        self.bytes += flat.contiguous().view(torch.uint8).numpy().tobytes()
        self.bytes += bytes(-len(self.bytes) % 64)
        return offset


def fields(call: Call, memory: Memory) -> dict[str, Any]:
    """Members of `Attention` by name."""
    args = call.args
    q, k, v = args["q"], args["k"], args["v"]
    paged = args.get("block_table") is not None
    scale = args.get("softmax_scale")
    total_q, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    members: dict[str, Any] = {
        "q_dtype": q.dtype,
        "kv_dtype": k.dtype,
        "out_dtype": args.get("out_dtype") or q.dtype,
        "batch": len(args["cu_seqlens_q"]) - 1,
        "total_q": total_q,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "head_dim_v": v.shape[-1],
        "q": q,
        "q_stride_token": q.stride(0),
        "q_stride_head": q.stride(1),
        "page_size": k.shape[2] if paged else 0,
        "softmax_scale": 1 / math.sqrt(head_dim) if scale is None else scale,
        "softcap": args.get("softcap", 0.0),
        "window_left": args.get("window_size_left", -1),
        "window_right": 0 if args.get("causal") else args.get("window_size_right", -1),
        "out_scale": args.get("out_scale"),
    }
    for name, t in (("k", k), ("v", v)):
        members[f"{name}.data"] = t
        members[f"{name}.stride_page"] = t.stride(0) if paged else 0
        members[f"{name}.stride_head"] = t.stride(1)
        members[f"{name}.stride_token"] = t.stride(2 if paged else 0)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "sinks"):
        members |= strided(name, args.get(name), first=0)
    for name in ("alibi_slopes", "q_descale", "k_descale", "v_descale"):
        t = args.get(name)
        members |= strided(name, t, first=0 if t is not None and t.dim() == 2 else 1)
    if (bias := args.get("attn_bias")) is not None:
        members |= {"bias": bias, "bias_dtype": bias.dtype}
        members["bias_stride_head"] = bias.stride(0) if bias.shape[0] > 1 else 0
        members["bias_stride_query"] = bias.stride(1)
        members["bias_stride_key"] = bias.stride(2)
    if args.get("dropout_p"):
        members |= dropout(args["dropout_p"], *args["rng_state"].tolist())
    layout_heads = 1
    if call.op == "blocksparse":
        members |= layout(args)
        layout_heads = members["layout.num_heads"]
    members["num_groups"] = num_heads if layout_heads > num_kv_heads else num_kv_heads
    members["group_size"] = num_heads // members["num_groups"]
    return {name: plain(value, memory) for name, value in members.items() if value is not None}


def strided(name: str, t: Tensor | None, first: int) -> dict[str, Any]:
    """`Strided`, whose dimension `first` is the tensor's first one."""
    if t is None:
        return {}
    strides = {f"{name}.stride{first + i}": stride for i, stride in enumerate(t.stride())}
    return {f"{name}.data": t, **strides}


def dropout(p: float, seed: int, offset: int) -> dict[str, Any]:
    """`Dropout`."""
    return {
        "dropout.enabled": 1,
        "dropout.seed[0]": seed % 2**32,
        "dropout.seed[1]": (seed >> 32) % 2**32,
        "dropout.offset": offset % 2**32,
        "dropout.threshold": math.floor(p * 2**32),
        "dropout.keep_scale": 1 / (1 - p),
    }


def layout(args: dict[str, Any]) -> dict[str, Any]:
    """`BlockLayout`."""
    crow, col = args["crow_indices"], args["col_indices"]
    batched = crow.dim() == 3
    return {
        "layout.crow": crow,
        "layout.crow_batch": crow.stride(0) if batched else 0,
        "layout.crow_head": crow.stride(-2),
        "layout.crow_row": crow.stride(-1),
        "layout.col": col,
        "layout.col_batch": col.stride(0) if batched else 0,
        "layout.col_head": col.stride(-2),
        "layout.col_entry": col.stride(-1),
        "layout.num_heads": crow.shape[-2],
        "layout.rows": crow.shape[-1] - 1,
        "layout.nnz": col.shape[-1],
        "layout.q_block_size": args["q_block_size"],
        "layout.k_block_size": args["k_block_size"],
    }


def plain(value: Any, memory: Memory) -> int | float:
    """A number for the file of fields."""
    if isinstance(value, Tensor):
        return memory.add(value)
    return DTYPES.index(value) if isinstance(value, torch.dtype) else value


def run(call: Call, command: list[str], folder: Path) -> tuple[Tensor, Tensor]:
    """The output and lse that `command`, run_call under whatever runs it, computes."""
    memory = Memory()
    members = fields(call, memory)
    paths = [folder / name for name in ("fields", "blob", "out")]
    paths[0].write_text("".join(f"{name} {value!r}\n" for name, value in members.items()))
    paths[1].write_bytes(memory.bytes)
    subprocess.run([*command, *map(str, paths)], check=True)
    shape = members["total_q"], members["num_heads"], members["head_dim_v"]
    dtype = call.args.get("out_dtype") or call.args["q"].dtype
    raw = torch.from_numpy(np.fromfile(paths[2], np.uint8))
    out, lse = torch.empty(shape, dtype=dtype), torch.empty(shape[1], shape[0])
    split = out.numel() * dtype.itemsize
    out.view(-1).view(torch.uint8)[:] = raw[:split]
    lse.view(-1).view(torch.uint8)[:] = raw[split:]
    used = call.args["cu_seqlens_q"][-1]  # the op itself, not a kernel, writes the padding rows
    out[used:] = 0
    lse[:, used:] = float("-inf")
    return out, lse
