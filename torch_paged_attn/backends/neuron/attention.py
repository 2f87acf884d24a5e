"""From a checked call to tables, launches, and the op's layout again: what `flash_varlen` and
`blocksparse` share.

The work list is built on the host and the lengths are read there: on a device that is a wait, once
for the layers of a step.
"""

from typing import NoReturn

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, BlockLayout
from torch_paged_attn.backends.neuron import attention_kernel as engine
from torch_paged_attn.backends.neuron.adapter import as_bytes, launch, num_programs
from torch_paged_attn.backends.neuron.bias import lay_out_bias
from torch_paged_attn.backends.neuron.dropout_kernel import NUM_WORDS
from torch_paged_attn.backends.neuron.philox_words import philox_words
from torch_paged_attn.backends.neuron.plan import Geometry, Metadata, plan
from torch_paged_attn.backends.neuron.row_scalars import row_scalars
from torch_paged_attn.backends.neuron.stored_rows import StoredRows, stored_rows
from torch_paged_attn.backends.neuron.tables import Heads
from torch_paged_attn.backends.neuron.toolchain import nl
from torch_paged_attn.ops.checks import FLOAT, FLOAT8

P = engine.P
WIDEST_VALUE = 512  # float32 in one bank of PSUM
WIDEST_KEY = 1024
KEY_TILES = (512, 256, 128)
DEPTHS = (16, 8, 4, 2, 1)

# bytes of a partition of SBUF for an item's keys and values, and for what a stack keeps
KEY_BYTES = 64 * 1024
STACK_BYTES = 96 * 1024

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
    q, k, v, layout = call.q, call.k, call.v, call.layout
    reason = unsupported(k, v)
    if reason is not None:
        refuse(call.op, reason)
    if call.total_q == 0:
        return call.new_results()
    total_q, num_kv_heads = call.total_q, call.num_kv_heads
    head_dim, head_dim_v = call.head_dim, call.head_dim_v
    out_dtype, softcap, dropout_p = call.result_dtype, call.softcap, call.dropout_p
    sinks, alibi_slopes, attn_bias = call.sinks, call.alibi_slopes, call.attn_bias
    # eight bits of query are exact in sixteen; eight bits of result are rounded by PyTorch
    wide_q = q if q.dtype in FLOAT else q.to(torch.bfloat16)
    out_type = out_dtype if out_dtype in FLOAT else torch.float32

    key_bytes = (head_dim + head_dim_v) * k.itemsize
    heads = _heads(num_kv_heads, call.group_size, layout, key_bytes)
    splits_heads = heads.together % num_programs() == 0
    loaded = heads.together // num_programs() if splits_heads else heads.together
    tile_k = next(n for n in KEY_TILES if n // P * loaded * key_bytes <= KEY_BYTES or n == P)
    kept = loaded * (head_dim * wide_q.itemsize + head_dim_v * 4)
    deepest = next(n for n in DEPTHS if n * kept <= STACK_BYTES or n == 1)

    by_head = heads.planes > 1
    k_rows, v_rows = (_rows(x, call.block_table is not None, by_head) for x in (k, v))
    run = _run(k, k_rows, v_rows, tile_k) if call.page_size else 1
    geometry = Geometry(
        total_q=total_q,
        window_size_left=call.window_size_left,
        window_size_right=call.window_right,
        has_dropout=dropout_p > 0.0,
        heads=heads,
        num_pages=k.shape[0],
        page_size=call.page_size,
        tile_k=tile_k,
        run=run,
        deepest=deepest,
        programs=1 if splits_heads else num_programs(),
    )
    metadata = Metadata(
        call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k, call.block_table, layout
    )

    num_rows = total_q * heads.num_heads // heads.together
    out = q.new_empty(num_rows, heads.together * head_dim_v, dtype=out_type)
    lse = q.new_empty(num_rows, heads.together, dtype=torch.float32)
    q_rows = wide_q.unflatten(1, (num_kv_heads, -1)).transpose(1, 2)
    q_rows = q_rows.reshape(num_rows, heads.together * head_dim)
    scale = call.scale / softcap if softcap > 0.0 else call.scale
    descales = (call.q_descale, call.k_descale, call.v_descale)
    scalars = row_scalars(sinks, alibi_slopes, descales, scale, call.cu_seqlens_q, total_q, heads)
    words = torch.zeros(1, NUM_WORDS, dtype=torch.int32, device=q.device)
    if dropout_p > 0.0:
        assert call.rng_state is not None  # checked
        words = philox_words(call.rng_state, dropout_p)
    for table in plan(metadata, geometry, (k_rows, v_rows)):
        bounds, bias, bias_rows, bias_stride = table.bounds, torch.zeros(1, tile_k), None, 0
        if attn_bias is not None:
            laid_out = lay_out_bias(attn_bias, table, heads, run)
            bias, bias_rows, bias_stride = laid_out.rows, laid_out.index, laid_out.head_stride
            absent = laid_out.absent.unflatten(1, (-1, P, run)).transpose(1, 2).flatten(2)
            bounds = torch.cat([bounds, absent.float()], 2)
        depth = table.work.depth
        if bias_rows is None:
            bias_rows = torch.zeros(1, P, depth, dtype=torch.int32)
        out, lse = launch(
            engine.attention_kernel,
            out,
            lse,
            q_rows,
            _readable(k_rows.storage, wide_q.dtype),
            _readable(v_rows.storage, wide_q.dtype),
            table.indices,
            bounds,
            table.count,
            table.positions,
            table.draws,
            words,
            scalars,
            bias.to(q.device),
            bias_rows.to(q.device),
            heads.together,
            heads.group_size,
            splits_heads,
            k_rows.layout,
            v_rows.layout,
            "" if k.dtype == wide_q.dtype else str(k.dtype).removeprefix("torch."),
            depth,
            tile_k // (P * run),
            run,
            float(scale),
            float(softcap),
            1.0 / (1.0 - dropout_p),
            sinks is not None,
            alibi_slopes is not None,
            any(descale is not None for descale in descales),
            attn_bias is not None,
            dropout_p > 0.0,
            bias_stride,
            len(table.indices) * loaded * depth > UNROLLED and hasattr(nl, "fori_loop"),
        )
    lse = lse.masked_fill(lse < engine.FLOOR / 2, float("-inf"))
    if out_dtype in FLOAT8:
        limit = torch.finfo(out_dtype).max
        out = (out if call.out_scale is None else out / call.out_scale).clamp(-limit, limit)
    # rows are (token, member of the group, KV head)
    out = out.view(total_q, -1, num_kv_heads, head_dim_v).transpose(1, 2)
    lse = lse.view(total_q, -1, num_kv_heads).permute(2, 1, 0)
    dense = torch.contiguous_format
    return (
        out.to(out_dtype).clone(memory_format=dense).flatten(1, 2),
        lse.clone(memory_format=dense).flatten(0, 1),
    )


def _heads(
    num_kv_heads: int,
    group_size: int,
    layout: BlockLayout | None,
    key_bytes: int,
) -> Heads:
    """One by one where a layout tells them apart, or where a tile of them all has no room."""
    planes = 1 if layout is None else layout.crow_indices.shape[-2]
    if planes == 1 and num_kv_heads * key_bytes > KEY_BYTES:
        planes = num_kv_heads
    return Heads(num_kv_heads, group_size, planes)


def _rows(cache: Tensor, is_paged: bool, by_head: bool) -> StoredRows:
    """Packed keys are one long page; without any, one that nobody sees."""
    pages = cache if is_paged else cache.transpose(0, 1)[None]
    if pages.numel() == 0:
        pages = pages.new_zeros(1, pages.shape[1], 1, pages.shape[3])
    rows = stored_rows(pages, by_head=by_head)
    assert rows is not None  # a copy is allowed
    return rows


def _readable(storage: Tensor, dtype: torch.dtype) -> Tensor:
    return as_bytes(storage) if storage.dtype in FLOAT8 and storage.dtype != dtype else storage


def _run(k: Tensor, k_rows: StoredRows, v_rows: StoredRows, tile_k: int) -> int:
    """How many tokens one gathered row may span: those of a page that lie side by side."""
    if any(rows.slot_stride != rows.dim for rows in (k_rows, v_rows)):
        return 1
    return next(run for run in (4, 2, 1) if k.shape[2] % run == 0 and run * P <= tile_k)
