"""Calls run by run_call.cpp. What the operators in csrc/ops make of the arguments is made here."""

import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_paged_attn.testing.inputs import Call

# as in csrc/core/attention.h, whose int4 are two numbers of torch's uint8
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64]


class Memory:
    """Tensors' storages, each once, laid out one behind the other."""

    def __init__(self) -> None:
        self.bytes = bytearray(64)
        self.storages: dict[int, tuple[int, Tensor]] = {}

    def add(self, t: Tensor) -> int:
        """Copy the storage of `t` unless it is there, and return where `t` begins."""
        storage = t.untyped_storage()
        if storage.data_ptr() not in self.storages:
            content = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.storages[storage.data_ptr()] = (len(self.bytes), content)
            self.bytes += content.numpy().tobytes()
            self.bytes += bytes(-len(self.bytes) % 64)
        return self.storages[storage.data_ptr()][0] + t.storage_offset() * t.itemsize

    def read_back(self, raw: Tensor) -> None:
        """Let the tensors hold what a call has made of the memory."""
        for offset, content in self.storages.values():
            content[:] = raw[offset : offset + len(content)]


def attention(call: Call) -> dict[str, Any]:
    """`Attention`."""
    args = call.args
    q, k, v = args["q"], args["k"], args["v"]
    paged = args.get("block_table") is not None
    scale = args.get("softmax_scale")
    total_q, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    members: dict[str, Any] = {
        "q_dtype": q.dtype,
        "kv_dtype": k.dtype,
        "v_dtype": v.dtype,
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
        "num_pages": k.shape[0] if paged else 0,
        "softmax_scale": 1 / math.sqrt(head_dim) if scale is None else scale,
        "softcap": args.get("softcap", 0.0),
        "window_left": args.get("window_size_left", -1),
        "window_right": 0 if args.get("causal") else args.get("window_size_right", -1),
        "out_scale": args.get("out_scale"),
        "batch_invariant": int(args.get("batch_invariant", False)),
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
    return members


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


def cache_write(name: str, new: Tensor, cache: Tensor, scale: Tensor | None) -> dict[str, Any]:
    """`CacheWrite`."""
    members = {
        "from": new,
        "from_stride_token": new.stride(0),
        "from_stride_head": new.stride(1),
        "from_dtype": new.dtype,
        "to": cache,
        "to_stride_page": cache.stride(0),
        "to_stride_head": cache.stride(1),
        "to_stride_token": cache.stride(2),
        "to_dtype": cache.dtype,
        "head_dim": new.shape[2],
        "streamed": int(cache.shape[3] * cache.itemsize % 64 == 0),
    }
    return {f"{name}.{member}": value for member, value in members.items()} | strided(
        f"{name}.scale", scale, first=1
    )


def part(name: str, out: Tensor, lse: Tensor) -> dict[str, Any]:
    """`MergeStates::Part`."""
    members = {"out": out, "lse": lse}
    members |= zip(("stride_token", "stride_head", "stride_dim"), out.stride(), strict=True)
    members |= zip(("lse_stride_head", "lse_stride_token"), lse.stride(), strict=True)
    return {f"{name}.{member}": value for member, value in members.items()}


def run(
    op: str, members: dict[str, Any], memory: Memory, command: list[str], folder: Path
) -> Tensor:
    """The bytes that `command`, run_call under whatever runs it, answers with."""
    paths = [folder / name for name in ("fields", "blob", "out")]
    numbers = {name: plain(value, memory) for name, value in members.items() if value is not None}
    paths[0].write_text("".join(f"{name} {value!r}\n" for name, value in numbers.items()))
    paths[1].write_bytes(memory.bytes)
    subprocess.run([*command, op, *map(str, paths)], check=True)
    return torch.from_numpy(np.fromfile(paths[2], np.uint8))


def out_and_lse(raw: Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `raw` holds: (total_q, num_heads, head_dim_v) of `dtype`, (num_heads, total_q)."""
    out, lse = torch.empty(shape, dtype=dtype), torch.empty(shape[1], shape[0])
    split = out.numel() * dtype.itemsize
    out.view(-1).view(torch.uint8)[:] = raw[:split]
    lse.view(-1).view(torch.uint8)[:] = raw[split:]
    return out, lse


def attend(call: Call, command: list[str], folder: Path) -> tuple[Tensor, Tensor]:
    """`flash_varlen` or `blocksparse`."""
    q, v = call.args["q"], call.args["v"]
    raw = run("attend", attention(call), Memory(), command, folder)
    dtype = call.args.get("out_dtype") or q.dtype
    out, lse = out_and_lse(raw, torch.Size([*q.shape[:2], v.shape[-1]]), dtype)
    used = call.args["cu_seqlens_q"][-1]  # the op itself, not a kernel, writes the padding rows
    out[used:] = 0
    lse[:, used:] = float("-inf")
    return out, lse


def attend_backward(
    call: Call,
    dout: Tensor,
    dlse: Tensor,
    out: Tensor,
    lse: Tensor,
    command: list[str],
    folder: Path,
) -> tuple[Tensor, ...]:
    """`flash_varlen_backward` or `blocksparse_backward`, all five results."""
    args, empty = call.args, call.args["q"].new_empty(0)
    members = {f"forward.{name}": value for name, value in attention(call).items()}
    for name, t in (("dout", dout), ("out", out)):
        members |= {
            name: t,
            f"{name}_stride_token": t.stride(0),
            f"{name}_stride_head": t.stride(1),
        }
    members |= strided("lse", lse, first=0) | strided("dlse", dlse, first=0)
    members["total_k"] = args["k"].shape[0]
    shapes = [(args[name].shape, args[name].dtype) for name in "qkv"]
    bias = args.get("attn_bias")
    if bias is not None and bias.dtype != torch.bool:
        members |= {"bias_heads": bias.shape[0], "bias_keys": bias.shape[2]}
        shapes.append((bias.shape, torch.float32 if bias.shape[0] == 1 else bias.dtype))
    else:
        shapes.append((empty.shape, empty.dtype))
    sinks = args.get("sinks")
    shapes.append((empty.shape, empty.dtype) if sinks is None else (sinks.shape, sinks.dtype))
    raw = run("attend_backward", members, Memory(), command, folder)
    results = list(tensors(raw, shapes))
    if bias is not None and bias.dtype != torch.bool:
        results[3] = results[3].to(bias.dtype)
    return tuple(results)


def tensors(raw: Tensor, shapes: list[tuple[torch.Size, torch.dtype]]) -> Iterator[Tensor]:
    """What `raw` holds, one after the other."""
    for shape, dtype in shapes:
        result = torch.empty(shape, dtype=dtype)
        size = result.numel() * dtype.itemsize
        result.view(-1).view(torch.uint8)[:] = raw[:size]
        raw = raw[size:]
        yield result


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, command: list[str], folder: Path
) -> tuple[Tensor, Tensor]:
    """`merge_states`."""
    names = ("total_q", "num_heads", "head_dim_v")
    members = dict(zip(names, out_a.shape, strict=True))
    members |= {"dtype": out_a.dtype, "out_dtype": out_a.dtype}
    members |= part("both[0]", out_a, lse_a) | part("both[1]", out_b, lse_b)
    raw = run("merge_states", members, Memory(), command, folder)
    return out_and_lse(raw, out_a.shape, out_a.dtype)


def reshape_and_cache(
    new: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    slots: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    residues: int,
    command: list[str],
    folder: Path,
) -> None:
    """`reshape_and_cache`, in place like the op, in 2 * `residues` tasks."""
    members = cache_write("key", new[0], caches[0], scales[0])
    members |= cache_write("value", new[1], caches[1], scales[1])
    members |= {
        "slots": slots,
        "slot_stride": slots.stride(0),
        "slots_are_int64": int(slots.dtype == torch.int64),
        "num_tokens": len(slots),
        "num_heads": new[0].shape[1],
        "page_size": caches[0].shape[2],
        "num_slots": caches[0].shape[0] * caches[0].shape[2],
        "residues": residues,
    }
    memory = Memory()
    memory.read_back(run("reshape_and_cache", members, memory, command, folder))
