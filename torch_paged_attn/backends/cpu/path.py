"""What the CPU kernels would do with a call: they say it themselves, from lengths."""

import dataclasses
import json
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, arguments
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops._library import instruction_sets
from torch_paged_attn.ops.paths import Path, is_real

# what multiplies bfloat16 and 8-bit numbers by twos; all else is multiplied in float32
PAIRS = {
    "avx512bf16": "pairs of bfloat16",
    "amx": "tiles of bfloat16",
    "neon_bf16": "pairs of bfloat16",
}


def products(isa: str, has_pairs: bool) -> str:
    """What is multiplied; the sums are float32."""
    return PAIRS.get(isa, "float32") if has_pairs else "float32"


def kernel_name(op: str, has_pairs: bool) -> str:
    """The kernels of an op on this machine's instruction set."""
    isa, _ = instruction_sets()
    has_products = op.startswith(("flash_varlen", "blocksparse", "select"))
    return f"{isa}, products of {products(isa, has_pairs)}" if has_products else isa


def path(op: str, call: Any) -> Path:
    """The path of a call."""
    isa, faster = instruction_sets()
    faster = faster[faster.index(isa) + 1 :]
    reason = f"{isa} is the fastest instruction set that processor and build have"
    if faster:
        reason = f"PAGED_ATTN_CPU_ISA={isa} leaves {', '.join(faster)} out"
    details: dict[str, Any] = {"instruction_set": isa, "threads": torch.get_num_threads()}
    if isinstance(call, BackwardCall):
        has_pairs = call.forward.q.dtype == torch.bfloat16
        details["products"] = products(isa, has_pairs)
        return Path("cpu", isa, reason, details)
    if not isinstance(call, AttentionCall):
        workspace = None if op.startswith("select") else 0
        return Path("cpu", isa, reason, details, workspace)
    told = _plan(call)
    has_pairs = bool(told.pop("has_pairs"))
    workspace = told["bytes_shared"] + told["threads"] * told["bytes_per_thread"]
    details |= {"products": products(isa, has_pairs), "lengths": "read", **told}
    if not all(map(is_real, call.given_tensors().values())):
        details["lengths"] = "assumed: all sequences the same, with as many keys as there may be"
    engines = {
        "rows": ("row_tasks", "a KV head has at most 16 rows of queries"),
        "tiles": ("tile_tasks", "keys are packed for more than 16 rows of queries"),
    }
    taken = [name for name, (tasks, _) in engines.items() if told[tasks]]
    if not taken:
        return Path("cpu", isa, "there is no query", details, workspace)
    reason = "; ".join([reason, *(f"{name}: {engines[name][1]}" for name in taken)])
    return Path("cpu", " and ".join([f"{isa} {taken[0]}", *taken[1:]]), reason, details, workspace)


def _plan(call: AttentionCall) -> dict[str, int]:
    """What the kernels say of a call."""
    if not all(map(is_real, call.given_tensors().values())):
        with torch.device("cpu"):  # whatever torch's default device is
            call = _imagined(call)
    if call.out is not None:
        call = dataclasses.replace(call, op="flash_varlen", out=None, out_dtype=call.result_dtype)
    given = call.given()
    listed = arguments(call.op)
    positional = [given[x.name] for x in listed if not x.keyword_only]
    options = {x.name: given[x.name] for x in listed if x.keyword_only}
    with torch.no_grad():
        return json.loads(getattr(torch.ops.paged_attn, f"{call.op}_plan")(*positional, **options))


def _imagined(call: AttentionCall) -> AttentionCall:
    """A call of the same shapes on the CPU: the rows of each tensor are one row of zeros, and
    sequences are as equally long as they can be.
    """
    found = {
        name: torch.zeros(x.shape[-1:], dtype=x.dtype).expand(x.shape)
        for name, x in call.given_tensors().items()
    }
    found["cu_seqlens_q"] = _even(call.total_q, call.batch)
    packed = call.k.shape[0] if call.block_table is None else None
    longest = _longest(call)
    if call.cu_seqlens_k is not None:
        most = call.batch * longest if packed is None else packed
        found["cu_seqlens_k"] = _even(most, call.batch)
    if call.seqused_k is not None:
        keys = longest
        if packed is not None:
            starts = found.get("cu_seqlens_k", found["cu_seqlens_q"])
            keys = int(starts.diff().min()) if call.batch else 0
        found["seqused_k"] = torch.full((call.batch,), keys, dtype=torch.int32)
    layout = call.layout
    if layout is not None:
        rows, nnz = layout.crow_indices.shape[-1] - 1, layout.col_indices.shape[-1]
        crow = _even(nnz, rows).expand(layout.crow_indices.shape)
        # a row lists its first columns
        col = torch.arange(nnz) - crow[..., :-1].reshape(-1, rows)[0].repeat_interleave(
            crow.reshape(-1, rows + 1)[0].diff().long()
        )
        col = col.to(torch.int32).expand(layout.col_indices.shape)
        layout = dataclasses.replace(layout, crow_indices=crow, col_indices=col)
    selection = call.selection
    if selection is not None:  # a list names the first units
        shape = selection.key_indices.shape
        units = torch.arange(shape[-1], dtype=torch.int32).expand(shape)
        counts = selection.num_selected
        if counts is not None:
            counts = torch.full(counts.shape, shape[-1], dtype=torch.int32)
        selection = dataclasses.replace(selection, key_indices=units, num_selected=counts)
    apart = "crow_indices", "col_indices", "key_indices", "num_selected"
    own: dict[str, Any] = {name: x for name, x in found.items() if name not in apart}
    return dataclasses.replace(call, layout=layout, selection=selection, **own)


def _longest(call: AttentionCall) -> int:
    """The most keys that a sequence can have, by its pages, the layout's rows and the bias's
    columns.
    """
    table, layout, bias = call.block_table, call.layout, call.attn_bias
    rooms = [call.k.shape[0] if table is None else table.shape[1] * call.page_size]
    if layout is not None:
        rooms.append((layout.crow_indices.shape[-1] - 1) * layout.q_block_size)
    if bias is not None:
        rooms.append(bias.shape[-1])
    return min(rooms)


def _even(total: int, parts: int) -> Tensor:
    """Where parts begin whose sizes differ by at most one."""
    if parts <= 0:
        return torch.zeros(1, dtype=torch.int32)
    return (torch.arange(parts + 1, dtype=torch.int64) * total // parts).to(torch.int32)
