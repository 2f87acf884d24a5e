"""The rules for arguments that `flash_varlen` and `blocksparse` share.

`check_attention` checks metadata only, so that it works on FakeTensors and inside compiled graphs.
`check_attention_values` reads tensors on the host. Both raise for the first rule that is broken.
"""

import itertools

import torch
from torch import Tensor

from torch_paged_attn.attention_call import (
    LATENT_COLUMNS,
    AttentionCall,
    key_lengths,
    numbers_of,
)
from torch_paged_attn.ops.checks import (
    FLOAT,
    FLOAT8,
    INT4,
    LARGEST_SCALE,
    QUANTISED,
    QUERY,
    check_devices,
    check_dim,
    check_dtype,
    check_lengths,
    check_per_head,
    check_rows,
    check_shape,
    fail,
    names,
)

INT32_MAX = 2**31 - 1
# key positions, up to 2**31 keys times the ranks, stay well within 64 bits
MOST_RANKS = 2**15
# ops without int4 and without scales by token
WITHOUT_TOKEN_SCALES = ("select_keys", "selected_mass")


def check_attention(call: AttentionCall) -> None:
    """Raise for shapes, dtypes, devices and options that no backend may accept."""
    _check_rows(call)
    _check_lengths(call)
    _check_scores(call)
    _check_scales(call)
    _check_options(call)
    check_devices(call.op, call.q.device, call.tensors())


def _check_rows(call: AttentionCall) -> None:
    op, q, k, v = call.op, call.q, call.k, call.v
    check_dim(op, "q", q, "(total_q, num_heads, head_dim)")
    paged = call.is_paged
    shape = "(total_k, num_kv_heads, head_dim) without block_table"
    if paged:
        shape = "(num_pages, num_kv_heads, page_size, head_dim) with block_table"
    check_dim(op, "k", k, shape)
    check_dim(op, "v", v, shape)
    check_dtype(op, "q", q, QUERY)
    int4 = () if op in WITHOUT_TOKEN_SCALES else (INT4,)
    stored = tuple(dict.fromkeys((q.dtype, *QUANTISED, *int4)))
    check_dtype(op, "k", k, stored)
    # latents beside rope keys have a dtype of their own
    check_dtype(op, "v", v, (k.dtype,) if call.q_latent is None else stored)
    if v.shape[:-1] != k.shape[:-1]:
        fail(op, "v", f"shape {tuple(v.shape)}", f"{tuple(k.shape[:-1])} + (head_dim_v,), as k")
    for name, size in (
        ("q's num_heads", call.num_heads),
        ("q's head_dim", call.head_dim),
        ("k's num_kv_heads", call.num_kv_heads),
        ("v's head_dim", call.head_dim_v),
        ("k's page_size", call.page_size if paged else 1),
    ):
        if size == 0:
            fail(op, name, "0", "at least 1")
    if call.num_heads > 65535:  # dropout counts heads in 16 bits
        fail(op, "q's num_heads", call.num_heads, "at most 65535")
    if call.num_heads % call.num_kv_heads:
        expected = f"a multiple of k's num_kv_heads, {call.num_kv_heads}"
        fail(op, "q's num_heads", call.num_heads, expected)
    if (head_dim := numbers_of(k)) != call.head_dim:
        expected = f"q's head_dim, {call.head_dim}"
        if k.dtype == INT4:
            expected += " (uint8 is int4, two numbers a byte; float8: .view(torch.float8_e4m3fn))"
        fail(op, "k's head_dim", head_dim, expected)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rows(op, name, tensor)
    if (latent := call.q_latent) is not None:
        shape = "(total_q, num_heads, head_dim_v)"
        check_dim(op, "q_latent", latent, shape)
        check_dtype(op, "q_latent", latent, (q.dtype,))
        check_shape(op, "q_latent", latent, (*q.shape[:2], call.head_dim_v), shape)
        check_rows(op, "q_latent", latent)


def _check_lengths(call: AttentionCall) -> None:
    op, cu_seqlens_q, table = call.op, call.cu_seqlens_q, call.block_table
    check_dim(op, "cu_seqlens_q", cu_seqlens_q, "(batch + 1)")
    check_dtype(op, "cu_seqlens_q", cu_seqlens_q, (torch.int32,))
    if cu_seqlens_q.shape[0] == 0:
        fail(op, "cu_seqlens_q", "no entries", "(batch + 1) entries, the first of them 0")
    if call.cu_seqlens_k is not None:
        check_lengths(op, "cu_seqlens_k", call.cu_seqlens_k, call.batch + 1, "(batch + 1)")
    if call.seqused_k is not None:
        check_lengths(op, "seqused_k", call.seqused_k, call.batch, "(batch)")
    if table is not None:
        check_dim(op, "block_table", table, "(batch, max_pages)")
        check_dtype(op, "block_table", table, (torch.int32,))
        if table.shape[0] != call.batch:
            expected = f"(batch, max_pages) with batch = {call.batch}"
            fail(op, "block_table", f"shape {tuple(table.shape)}", expected)
        if call.seqused_k is None and call.cu_seqlens_k is None:
            expected = "the key lengths beside block_table (or cu_seqlens_k)"
            fail(op, "seqused_k", "None", expected)
    if call.k_start is not None:
        check_lengths(op, "k_start", call.k_start, call.batch, "(batch)")
        if table is not None:
            fail(op, "k_start", "a tensor", "None beside block_table: it is for packed keys")
    if call.q_position is not None:
        check_lengths(op, "q_position", call.q_position, call.batch, "(batch)")
    for name, size in (("max_seqlen_q", call.max_seqlen_q), ("max_seqlen_k", call.max_seqlen_k)):
        # comparing a SymInt would put a guard on it, or fail if the graph does not know its value
        if isinstance(size, int) and size < 0:
            fail(op, name, size, "at least 0")


def _check_scores(call: AttentionCall) -> None:
    op, bias, num_heads = call.op, call.attn_bias, call.num_heads
    if bias is not None:
        check_dim(op, "attn_bias", bias, "(1 or num_heads, total_q, max Lk)")
        check_dtype(op, "attn_bias", bias, (*FLOAT, torch.bool))
        if bias.shape[0] not in (1, num_heads):
            fail(op, "attn_bias.shape[0]", bias.shape[0], f"1 or num_heads = {num_heads}")
        if bias.shape[1] != call.total_q:
            fail(op, "attn_bias.shape[1]", bias.shape[1], f"total_q = {call.total_q}")
    if (tail := call.tail_mask) is not None:
        check_dim(op, "tail_mask", tail, "(total_q, max Lq)")
        check_dtype(op, "tail_mask", tail, (torch.bool,))
        if tail.shape[0] != call.total_q:
            fail(op, "tail_mask.shape[0]", tail.shape[0], f"total_q = {call.total_q}")
    if call.alibi_slopes is not None:
        check_per_head(op, "alibi_slopes", call.alibi_slopes, "num_heads", num_heads, call.batch)
    if call.sinks is not None:
        check_dtype(op, "sinks", call.sinks, (torch.float32,))
        check_shape(op, "sinks", call.sinks, (num_heads,), "(num_heads)")


def _check_scales(call: AttentionCall) -> None:
    op, heads, out_scale = call.op, call.num_kv_heads, call.out_scale
    for name in ("q_descale", "k_descale", "v_descale"):
        scale = getattr(call, name)
        if scale is None:
            continue
        check_dtype(op, name, scale, (torch.float32,))
        by_token, shape = "", None
        if name != "q_descale" and op not in WITHOUT_TOKEN_SCALES:
            shape = call.k.shape[:-1]
            sizes = "(num_pages, num_kv_heads, page_size)" if call.is_paged else "(total_k, heads)"
            by_token = f"by token {sizes} = {tuple(shape)}, "
        shapes: list[tuple[int, ...] | None] = [(), shape]
        if name == "v_descale" and call.q_latent is not None:
            columns = *call.k.shape[:-1], call.head_dim_v // LATENT_COLUMNS
            if call.head_dim_v % LATENT_COLUMNS == 0:
                by_token += f"by {LATENT_COLUMNS} columns {columns}, "
                shapes.append(columns)
        if scale.shape not in shapes:
            or_else = f"(), {by_token}"
            check_per_head(op, name, scale, "num_kv_heads", heads, call.batch, or_else)
    if call.result_dtype not in QUERY:
        fail(op, "out_dtype", names((call.result_dtype,)), names(QUERY))
    if out_scale is not None:
        check_dtype(op, "out_scale", out_scale, (torch.float32,))
        if out_scale.shape not in ((), (1,)):
            fail(op, "out_scale", f"shape {tuple(out_scale.shape)}", "() or (1,)")
        if call.result_dtype not in FLOAT8:
            expected = f"None unless out_dtype is {names(FLOAT8)}"
            fail(op, "out_scale", f"a tensor for {names((call.result_dtype,))}", expected)


def _check_options(call: AttentionCall) -> None:
    op, scale, softcap, rng_state = call.op, call.scale, call.softcap, call.rng_state
    if not abs(scale) <= LARGEST_SCALE:
        fail(op, "softmax_scale", scale, "from -2**126 to 2**126")
    if softcap != 0.0 and not 1 / LARGEST_SCALE <= softcap <= LARGEST_SCALE:
        fail(op, "softcap", softcap, "0 (off), or from 2**-126 to 2**126")
    if softcap != 0.0 and abs(scale) > softcap * LARGEST_SCALE:
        got = f"{softcap} with a softmax_scale of {scale}"
        fail(op, "softcap", got, "at least 2**-126 of softmax_scale")
    for name in ("window_size_left", "window_size_right"):
        if getattr(call, name) < -1:
            fail(op, name, getattr(call, name), "-1 (unbounded) or more")
    if not 0.0 <= call.dropout_p < 1.0:
        fail(op, "dropout_p", call.dropout_p, "at least 0 and below 1")
    if call.dropout_p > 0.0 and rng_state is None:
        fail(op, "rng_state", "None", "a (2,) int64 tensor (seed, offset) when dropout_p > 0")
    if rng_state is not None:
        check_dtype(op, "rng_state", rng_state, (torch.int64,))
        if rng_state.shape != (5,):
            check_shape(op, "rng_state", rng_state, (2,), "(seed, offset)")
    if call.key_ranks != 1 or call.key_rank != 0 or call.key_interleave != 1:
        _check_key_ranks(call)


def _check_key_ranks(call: AttentionCall) -> None:
    op, ranks = call.op, call.key_ranks
    for name, size, most in (
        ("key_ranks", ranks, MOST_RANKS),
        ("key_interleave", call.key_interleave, INT32_MAX),
    ):
        if not 1 <= size <= most:
            fail(op, name, size, f"from 1 to {most}")
    if not 0 <= call.key_rank < ranks:
        fail(op, "key_rank", call.key_rank, f"from 0 to key_ranks - 1 = {ranks - 1}")


def check_attention_values(call: AttentionCall) -> None:
    """Raise for lengths, bounds and page ids that point outside the tensors. Reads tensors."""
    op, cu_seqlens_q, cu_seqlens_k = call.op, call.cu_seqlens_q, call.cu_seqlens_k
    is_paged, total_k = call.block_table is not None, call.k.shape[0]
    # of paged keys, or with k_start, cu_seqlens_k gives only lengths, not rows of k
    has_bounds = not is_paged and call.k_start is None
    _check_bounds(op, "cu_seqlens_q", cu_seqlens_q, call.total_q, "total_q")
    if cu_seqlens_k is not None:
        last = total_k if has_bounds else None
        _check_bounds(op, "cu_seqlens_k", cu_seqlens_k, last, "total_k")
    elif has_bounds:
        _check_bounds(op, "cu_seqlens_k (None: cu_seqlens_q)", cu_seqlens_q, total_k, "total_k")
    query_lens = cu_seqlens_q.diff().tolist()
    key_lens = slots = key_lengths(cu_seqlens_q, cu_seqlens_k, call.seqused_k).tolist()
    if call.seqused_k is not None and not is_paged and call.k_start is None:
        slots = key_lengths(cu_seqlens_q, cu_seqlens_k, None).tolist()
    if call.dropout_p > 0.0:
        _check_dropout_base(call)
    for b, (query_len, key_len, slot) in enumerate(zip(query_lens, key_lens, slots, strict=True)):
        if key_len < 0:
            fail(op, f"seqused_k[{b}]", key_len, "at least 0")
        if key_len > slot:
            fail(op, f"seqused_k[{b}]", key_len, f"at most the {slot} keys of cu_seqlens_k")
        if call.k_start is not None:
            start = int(call.k_start[b])
            if not 0 <= start <= total_k - key_len:
                expected = f"from 0 to total_k - Lk[{b}] = {total_k - key_len}"
                fail(op, f"k_start[{b}]", start, expected)
        if call.tail_mask is not None and key_len and query_len > call.tail_mask.shape[1]:
            columns, expected = call.tail_mask.shape[1], f"at least Lq[{b}] = {query_len}"
            fail(op, "tail_mask.shape[1]", columns, expected)
        if call.attn_bias is not None and query_len and key_len > call.attn_bias.shape[2]:
            columns, expected = call.attn_bias.shape[2], f"at least Lk[{b}] = {key_len}"
            fail(op, "attn_bias.shape[2]", columns, expected)
        if is_paged and call.selection is None:
            _check_pages(call, b, query_len, key_len)


def _check_bounds(op: str, name: str, bounds: Tensor, total: int | None, total_name: str) -> None:
    values = bounds.tolist()
    if values[0] != 0:
        fail(op, f"{name}[0]", values[0], "0")
    for i, (before, after) in enumerate(itertools.pairwise(values), start=1):
        if after < before:
            fail(op, f"{name}[{i}]", after, f"at least the entry before it, {before}")
    if total is not None and values[-1] > total:
        fail(op, f"{name}[-1]", values[-1], f"at most {total_name} = {total}")


def _check_pages(call: AttentionCall, b: int, query_len: int, key_len: int) -> None:
    assert call.block_table is not None
    pages, page_size, num_pages = call.block_table[b], call.page_size, call.k.shape[0]
    needed = -(-key_len // page_size)
    if needed > pages.shape[0]:
        expected = f"at least {needed} for Lk[{b}] = {key_len} and page_size = {page_size}"
        fail(call.op, "block_table.shape[1]", pages.shape[0], expected, RuntimeError)
    seen = _seen_keys(call, b, query_len, key_len)
    first, stop = seen.start // page_size, -(-seen.stop // page_size)
    for i, page in enumerate(pages[first:stop].tolist(), start=first):
        if not 0 <= page < num_pages:
            expected = f"a page from 0 to {num_pages - 1}"
            fail(call.op, f"block_table[{b}, {i}]", page, expected, IndexError)


def _seen_keys(call: AttentionCall, b: int, query_len: int, key_len: int) -> range:
    """A range that holds every key that a query of the sequence sees. attn_bias, tail_mask and the
    layout may hide more of them.
    """
    first, left, right = int(call.first_positions()[b]), call.window_size_left, call.window_right
    if call.layout is not None and first + query_len <= 0:  # no row for a negative position
        return range(0)
    start = 0 if left < 0 else _keys_before(call, first - left, key_len)
    stop = key_len if right < 0 else _keys_before(call, first + query_len + right, key_len)
    return range(start, stop) if query_len and start < stop else range(0)


def _keys_before(call: AttentionCall, position: int, key_len: int) -> int:
    """The number of this rank's keys of a sequence whose positions are below `position`."""
    run, span = call.key_interleave, call.key_interleave * call.key_ranks
    spans, rest = divmod(position, span)
    keys = spans * run + min(max(rest - call.key_rank * run, 0), run)
    return min(max(keys, 0), key_len)


def _check_dropout_base(call: AttentionCall) -> None:
    assert call.rng_state is not None
    values = call.rng_state.tolist()[2:]
    most = 65535 - call.num_heads, INT32_MAX, INT32_MAX
    for name, value, largest in zip(("head", "row", "column"), values, most, strict=False):
        if not 0 <= value <= largest:
            fail(call.op, f"rng_state's first {name}", value, f"from 0 to {largest}")
