"""The ops of attention: plan a call on the host, launch it, lay out its results.

The metadata is read on the host for every call, which waits for the device; see `plan`.
"""

import dataclasses
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron import BACKEND
from torch_paged_attn.backends.neuron.bias import BiasTask
from torch_paged_attn.backends.neuron.kernels.attention import attention_kernel
from torch_paged_attn.backends.neuron.kernels.groups import Options, RowLayout
from torch_paged_attn.backends.neuron.kernels.query_tile import FLOOR, LOWEST, P
from torch_paged_attn.backends.neuron.paged_kv import PagedKV, as_rows
from torch_paged_attn.backends.neuron.plan import on_host, plan, values_of
from torch_paged_attn.backends.neuron.runtime import as_bytes, launch
from torch_paged_attn.backends.neuron.tables import (
    WorkInfo,
    descales_of,
    has_token_scales,
    philox_words,
    row_scalars,
    score_scale,
    token_scales,
)
from torch_paged_attn.backends.neuron.tile_sizes import TileSizes, choose_tile_sizes, heads_of
from torch_paged_attn.backends.neuron.toolchain import nl
from torch_paged_attn.ops import checks
from torch_paged_attn.ops.checks import FLOAT, FLOAT8
from torch_paged_attn.ops.lacking import refuse_lacking
from torch_paged_attn.ops.merge_states import composed_list as merge_states_list
from torch_paged_attn.ops.selected_pages import NamedPages, attend_pages, named_pages

WIDEST_VALUE = 512  # float32 in one bank of PSUM
WIDEST_KEY = 1024

LISTS = "key_indices", "num_selected"

# (item, head, tile) triples that are unrolled; more run in a loop where the package has one
UNROLLED = 256


def refuse(op: str, reason: str) -> NoReturn:
    """Raise for a call that the contract allows and this backend does not support."""
    checks.refuse(op, f"not supported by the neuron backend: {reason}")


def refuse_wide(op: str, k: Tensor, v: Tensor) -> None:
    """Raise for a call whose heads have no room on the chip."""
    for name, given, widest in (("k", k, WIDEST_KEY), ("v", v, WIDEST_VALUE)):
        if given.shape[-1] > widest:
            refuse(op, f"{name} has head_dim {given.shape[-1]}; supported: at most {widest}")


def flash_varlen(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.flash_varlen`."""
    return attend(AttentionCall.flash_varlen(*args, **kwargs))


def flash_varlen_out(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Arguments as in `ops.flash_varlen_out`; the results of kernels are copied."""
    found, lse = flash_varlen(*args, out_dtype=out.dtype, **kwargs)
    out.copy_(found)
    return lse


def blocksparse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.blocksparse`: the keys of items are those of the listed blocks."""
    return attend(AttentionCall.blocksparse(*args, **kwargs))


def selected_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.selected_attention`: whole pages, as `flash_varlen`."""
    call = AttentionCall.selected_attention(*args, **kwargs)
    refuse_lacking(call, "neuron", BACKEND.lacks)
    return attend_pages(call, "neuron", attend, find=_named_on_host)


def merge_states(*parts: Tensor) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.merge_states`: the graph compiler fuses plain PyTorch."""
    return merge_states_list(parts[::2], parts[1::2])


def _named_on_host(call: AttentionCall) -> NamedPages:
    """Lists, lengths and block tables are read on the host: Neuron's compiler has no sort."""
    assert call.selection is not None
    lists = dataclasses.replace(call.selection, **values_of(call.selection, LISTS))
    return named_pages(dataclasses.replace(on_host(call), selection=lists)).to(call.q.device)


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Results of a checked call."""
    refuse_lacking(call, "neuron", BACKEND.lacks)
    refuse_wide(call.op, call.k, call.v)
    if call.total_q == 0:
        return call.new_results()
    # 8 bits of query are exact in 16; results of 8 bits are rounded by PyTorch
    q = call.q if call.q.dtype in FLOAT else call.q.to(torch.bfloat16)
    out_type = call.result_dtype if call.result_dtype in FLOAT else torch.float32

    heads = heads_of(call)
    k, v = (rows_of(x, call, by_head=heads.planes > 1) for x in (call.k, call.v))
    tiles = choose_tile_sizes(call, heads, (k, v))
    # a row is (token, member of the group), of every KV head or of one
    num_rows, width = call.total_q * heads.num_heads // heads.together, heads.together
    q_rows = q.unflatten(1, (call.num_kv_heads, -1)).transpose(1, 2).reshape(num_rows, -1)
    out = q.new_empty(num_rows, width * call.head_dim_v, dtype=out_type)
    lse = q.new_empty(num_rows, width, dtype=torch.float32)

    words, scalars = philox_words(call), row_scalars(call, heads)
    for planned in plan(call, tiles, (k, v)):
        bias = BiasTask.of(call, planned, heads)
        info = bias.info
        out, lse = launch(
            attention_kernel,
            out=out,
            lse=lse,
            q=q_rows,
            k=_readable(k.storage, q.dtype),
            v=_readable(v.storage, q.dtype),
            **info.tables,
            words=words,
            row_scalars=scalars,
            bias=bias.rows,
            token_scales=token_scales(call, info, heads, bias.absent),
            options=options_of(call, info, tiles, (k, v), bias.head_stride),
        )
    return _results(call, out, lse)


def options_of(
    call: AttentionCall,
    info: WorkInfo,
    tiles: TileSizes,
    rows: tuple[PagedKV, PagedKV],
    bias_head_stride: int = 0,
) -> Options:
    """What the kernel of a launch is compiled for; `rows` are those of k and v."""
    work, heads = info.work, tiles.heads
    stored, dtype = call.k.dtype, call.q.dtype if call.q.dtype in FLOAT else torch.bfloat16
    triples = len(info.indices) * tiles.loaded * work.depth
    return Options(
        num_kv_heads=heads.together,
        group_size=heads.group_size,
        splits_heads=tiles.splits_heads,
        k_row=RowLayout(*rows[0].layout),
        v_row=RowLayout(*rows[1].layout),
        kv_dtype="" if stored == dtype else str(stored).removeprefix("torch."),
        depth=work.depth,
        chunks=work.tile_k // (P * work.run),
        run=work.run,
        share=work.share,
        scale=score_scale(call),
        softcap=float(call.softcap),
        keep_scale=1.0 / (1.0 - call.dropout_p),
        bias_head_stride=bias_head_stride,
        has_sinks=call.sinks is not None,
        has_alibi=call.alibi_slopes is not None,
        has_scales=any(x is not None for x in descales_of(call)),
        has_token_scales=has_token_scales(call),
        has_bias=call.attn_bias is not None,
        has_dropout=call.dropout_p > 0.0,
        is_dynamic=triples > UNROLLED and hasattr(nl, "fori_loop"),
        sees_all_keys=False,
        backward=None,
    )


def rows_of(cache: Tensor, call: AttentionCall, by_head: bool) -> PagedKV:
    """A cache as rows; packed keys are one long page, and no keys are a page that no row sees."""
    pages = cache if call.page_size else cache.transpose(0, 1)[None]
    if pages.numel() == 0:
        pages = pages.new_zeros(1, pages.shape[1], 1, pages.shape[3])
    rows = as_rows(pages, by_head=by_head)
    assert rows is not None  # a copy is allowed
    return rows


def _readable(storage: Tensor, dtype: torch.dtype) -> Tensor:
    """A cache's storage as the kernel takes it: 8-bit floats as bytes."""
    return as_bytes(storage) if storage.dtype in FLOAT8 and storage.dtype != dtype else storage


def _results(call: AttentionCall, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The op's layout, from rows of (token, member of the group) and columns of KV heads."""
    lse = lse.masked_fill(lse <= FLOOR, float("-inf"))
    if call.attn_bias is not None or call.sinks is not None:
        lse = lse.masked_fill(lse == LOWEST, torch.finfo(torch.float32).min)
    if call.result_dtype in FLOAT8:
        limit = torch.finfo(call.result_dtype).max
        out = (out if call.out_scale is None else out / call.out_scale).clamp(-limit, limit)
    out = out.view(call.total_q, -1, call.num_kv_heads, call.head_dim_v).transpose(1, 2)
    lse = lse.view(call.total_q, -1, call.num_kv_heads).permute(2, 1, 0)
    dense = torch.contiguous_format
    return (
        out.to(call.result_dtype).clone(memory_format=dense).flatten(1, 2),
        lse.clone(memory_format=dense).flatten(0, 1),
    )
