"""From a checked call to tables, launches, and the op's layout again: what `flash_varlen` and
`blocksparse` share.

The work list is built on the host and the lengths are read there: on a device that is a wait, once
for the layers of a step.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron import attention_kernel as engine
from torch_paged_attn.backends.neuron.adapter import as_bytes, launch
from torch_paged_attn.backends.neuron.bias import lay_out_bias
from torch_paged_attn.backends.neuron.dropout_kernel import NUM_WORDS
from torch_paged_attn.backends.neuron.philox_words import philox_words
from torch_paged_attn.backends.neuron.plan import plan
from torch_paged_attn.backends.neuron.row_scalars import row_scalars
from torch_paged_attn.backends.neuron.stored_rows import StoredRows, stored_rows
from torch_paged_attn.backends.neuron.tables import Tables
from torch_paged_attn.backends.neuron.tiles import Tiles, heads_of, tiles_of
from torch_paged_attn.backends.neuron.toolchain import nl
from torch_paged_attn.ops.checks import FLOAT, FLOAT8

P = engine.P
WIDEST_VALUE = 512  # float32 in one bank of PSUM
WIDEST_KEY = 1024

# (item, head, tile) triples that are unrolled; more run in a loop where the package has one
UNROLLED = 256


def unsupported(k: Tensor, v: Tensor) -> str | None:
    """What of a valid call has no kernel: the argument, what came, what is supported."""
    head_dim, head_dim_v = k.shape[-1], v.shape[-1]
    if head_dim > WIDEST_KEY:
        return f"k has head_dim {head_dim}; supported: at most {WIDEST_KEY}"
    if head_dim_v > WIDEST_VALUE:
        return f"v has head_dim {head_dim_v}; supported: at most {WIDEST_VALUE}"
    return None


def refuse(op: str, reason: str) -> NoReturn:
    """Raise for what the contract allows and this backend does not do."""
    raise NotImplementedError(f"paged_attn::{op}: Neuron: {reason}")


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """A checked call."""
    reason = unsupported(call.k, call.v)
    if reason is not None:
        refuse(call.op, reason)
    if call.total_q == 0:
        return call.new_results()
    # eight bits of query are exact in sixteen; eight bits of result are rounded by PyTorch
    q = call.q if call.q.dtype in FLOAT else call.q.to(torch.bfloat16)
    out_type = call.result_dtype if call.result_dtype in FLOAT else torch.float32

    heads = heads_of(call)
    k_rows, v_rows = (_rows(x, call, by_head=heads.planes > 1) for x in (call.k, call.v))
    tiles = tiles_of(call, heads, q.itemsize, (k_rows, v_rows))
    # a row is (token, member of the group), of every KV head or of one
    num_rows, width = call.total_q * heads.num_heads // heads.together, heads.together
    q_rows = q.unflatten(1, (call.num_kv_heads, -1)).transpose(1, 2).reshape(num_rows, -1)
    out = q.new_empty(num_rows, width * call.head_dim_v, dtype=out_type)
    lse = q.new_empty(num_rows, width, dtype=torch.float32)

    scale = call.scale / call.softcap if call.softcap > 0.0 else call.scale
    scalars = row_scalars(call, scale, heads)
    words = torch.zeros(1, NUM_WORDS, dtype=torch.int32, device=q.device)
    if call.dropout_p > 0.0:
        assert call.rng_state is not None  # checked
        words = philox_words(call.rng_state, call.dropout_p)
    for table in plan(call, tiles, (k_rows, v_rows)):
        bounds, *bias, bias_stride = _masks(call, table, tiles)
        out, lse = launch(
            engine.attention_kernel,
            out,
            lse,
            q_rows,
            _readable(k_rows.storage, q.dtype),
            _readable(v_rows.storage, q.dtype),
            table.indices,
            bounds,
            table.count,
            table.positions,
            table.draws,
            words,
            scalars,
            *bias,
            heads.together,
            heads.group_size,
            tiles.splits_heads,
            k_rows.layout,
            v_rows.layout,
            "" if call.k.dtype == q.dtype else str(call.k.dtype).removeprefix("torch."),
            table.work.depth,
            tiles.chunks,
            tiles.run,
            float(scale),
            float(call.softcap),
            1.0 / (1.0 - call.dropout_p),
            call.sinks is not None,
            call.alibi_slopes is not None,
            any(d is not None for d in (call.q_descale, call.k_descale, call.v_descale)),
            call.attn_bias is not None,
            call.dropout_p > 0.0,
            bias_stride,
            _loops(table, tiles),
        )
    return _results(call, out, lse)


def _masks(call: AttentionCall, table: Tables, tiles: Tiles) -> tuple[Any, ...]:
    """`attention_kernel`'s bounds, bias, bias_rows and bias_head_stride."""
    device = call.q.device
    if call.attn_bias is None:
        bias = torch.zeros(1, tiles.tile_k, device=device)
        index = torch.zeros(1, P, table.work.depth, dtype=torch.int32, device=device)
        return table.bounds, bias, index, 0
    laid_out = lay_out_bias(call.attn_bias, table, tiles.heads, tiles.run)
    absent = laid_out.absent.unflatten(1, (-1, P, tiles.run)).transpose(1, 2).flatten(2)
    bounds = torch.cat([table.bounds, absent.float()], 2)
    return bounds, laid_out.rows, laid_out.index.to(device), laid_out.head_stride


def _loops(table: Tables, tiles: Tiles) -> bool:
    triples = len(table.indices) * tiles.loaded * table.work.depth
    return triples > UNROLLED and hasattr(nl, "fori_loop")


def _rows(cache: Tensor, call: AttentionCall, by_head: bool) -> StoredRows:
    """Packed keys are one long page; without any, one that nobody sees."""
    pages = cache if call.page_size else cache.transpose(0, 1)[None]
    if pages.numel() == 0:
        pages = pages.new_zeros(1, pages.shape[1], 1, pages.shape[3])
    rows = stored_rows(pages, by_head=by_head)
    assert rows is not None  # a copy is allowed
    return rows


def _readable(storage: Tensor, dtype: torch.dtype) -> Tensor:
    return as_bytes(storage) if storage.dtype in FLOAT8 and storage.dtype != dtype else storage


def _results(call: AttentionCall, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """From rows of (token, member of the group) and columns of KV heads to the op's layout."""
    lse = lse.masked_fill(lse < engine.FLOOR / 2, float("-inf"))
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
