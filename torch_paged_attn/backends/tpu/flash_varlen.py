"""`flash_varlen` in JAX: from the op's arguments to tiles and pages, a kernel, and back.

Prefill and decode of one batch run as two launches of one kernel: sequences of one token in tiles
of one token, the others in long ones. No value is read on the host, and lengths that change do not
compile anything anew.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from torch_paged_attn.backends.tpu.attention_kernel import Statics, attend_tiles
from torch_paged_attn.backends.tpu.config import Config, choose_config
from torch_paged_attn.backends.tpu.pages import Pages, keys_per_step, lay_out_pages
from torch_paged_attn.backends.tpu.refusal import refuse
from torch_paged_attn.backends.tpu.softmax import LOG2_E
from torch_paged_attn.backends.tpu.tiles import Cut, Lengths, Window, cut_queries

FLOATS = ("float32", "bfloat16")
NARROW = ("float8_e4m3fn", "float8_e5m2", "int8")
SUBLANES = 8

# up to this many tokens of a sequence, all of them are one tile
SHORT = 8


def unsupported(
    q: Array,
    k: Array,
    *,
    attn_bias: Array | None = None,
    dropout_p: float = 0.0,
    out_dtype: Any = None,
    **_rest: Any,
) -> str | None:
    """What of a valid call has no kernel yet: the argument, what came, what is supported."""
    if q.dtype.name not in FLOATS:
        return f"q has dtype {q.dtype.name}; supported: {', '.join(FLOATS)}"
    if k.dtype.name not in (q.dtype.name, *NARROW):
        return f"k has dtype {k.dtype.name}; supported: {', '.join((q.dtype.name, *NARROW))}"
    if out_dtype is not None and jnp.dtype(out_dtype).name not in FLOATS:
        return f"out_dtype is {jnp.dtype(out_dtype).name}; supported: {', '.join(FLOATS)}"
    if attn_bias is not None:
        return "attn_bias has no kernel yet; supported: None"
    if dropout_p > 0.0:
        return f"dropout_p is {dropout_p}; supported: 0"
    return None


STATIC = (
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "causal",
    "window_size_left",
    "window_size_right",
    "softcap",
    "dropout_p",
    "out_dtype",
    "config",
    "interpret",
)


@functools.partial(jax.jit, static_argnames=STATIC)
def flash_varlen(
    q: Array,
    k: Array,
    v: Array | None,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    seqused_k: Array | None = None,
    block_table: Array | None = None,
    attn_bias: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    out_scale: Array | None = None,
    rng_state: Array | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    out_dtype: Any = None,
    config: Config | None = None,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Arguments as in the op, in JAX's types; `(out, softmax_lse)`.

    A cache that is one array `(2, num_pages, num_kv_heads, page_size, head_dim)` is passed whole as
    `k`, with `v` None: slices of it would be copies. `interpret` is Pallas' own.
    """
    reason = unsupported(**locals())
    if reason is not None:
        refuse("flash_varlen", reason)
    config = choose_config(config)
    total_q, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[-3] if block_table is not None else k.shape[1]
    out_dtype = jnp.dtype(out_dtype or q.dtype)
    lengths, first_key = _lengths(cu_seqlens_q, cu_seqlens_k, seqused_k)
    batch = lengths.query.shape[0]
    if total_q == 0 or batch == 0:
        dim_v = (k if v is None else v).shape[-1]
        out = jnp.zeros((total_q, num_heads, dim_v), out_dtype)
        return out, jnp.full((num_heads, total_q), -jnp.inf, jnp.float32)

    pages = lay_out_pages(k, v, lengths, first_key, block_table, widest_step=2 * config.block_k)
    group_size = num_heads // num_kv_heads
    per_kv_head = functools.partial(_per_kv_head, batch=batch, num_kv_heads=num_kv_heads)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    score_scale = None
    if q_descale is not None or k_descale is not None:
        score_scale = per_kv_head(q_descale) * per_kv_head(k_descale)
    tile_sizes = _tile_sizes(max_seqlen_q or total_q, group_size, config)
    window = Window(window_size_left, 0 if causal else window_size_right)

    cuts, outs, lses = [], [], []
    for tile_q in tile_sizes:
        is_short = lengths.query <= tile_sizes[0]
        chosen = jnp.full(batch, True)
        if len(tile_sizes) > 1:
            chosen = is_short if tile_q == tile_sizes[0] else ~is_short
        cut = cut_queries(
            lengths, chosen, total_q, tile_q=tile_q, window=window, num_cores=config.num_cores
        )
        rows = functools.partial(
            _as_rows, num_kv_heads=num_kv_heads, group_size=group_size, tile_q=tile_q
        )
        statics = Statics(
            tile_q=tile_q,
            block_k=_block_k(pages, config),
            num_buffers=config.num_buffers,
            num_cores=config.num_cores,
            vmem_bytes=config.vmem_bytes,
            softmax_scale=float(scale),
            softcap=float(softcap),
            window=window,
            out_dtype=out_dtype,
            interpret=interpret,
        )
        out, lse = attend_tiles(
            _queries_as_tiles(q, cut, num_kv_heads),
            pages,
            cut.tiles,
            statics,
            sinks=None if sinks is None else rows(sinks * LOG2_E),
            slopes=None if alibi_slopes is None else rows(alibi_slopes * LOG2_E),
            score_scale=score_scale,
            v_descale=None if v_descale is None else per_kv_head(v_descale),
        )
        cuts.append(cut)
        outs.append(_tiles_as_tokens(out, cut, group_size, tile_q))
        lses.append(_tiles_as_tokens(lse[..., None], cut, group_size, tile_q)[..., 0])
    out, lse = outs[-1], lses[-1]
    if len(tile_sizes) > 1:
        of_token = jnp.searchsorted(cu_seqlens_q[1:], jnp.arange(total_q), side="right")
        is_short = (lengths.query <= tile_sizes[0])[jnp.minimum(of_token, batch - 1)]
        out = jnp.where(is_short[:, None, None], outs[0], out)
        lse = jnp.where(is_short[:, None], lses[0], lse)
    is_padding = jnp.arange(total_q) >= cu_seqlens_q[-1]
    out = jnp.where(is_padding[:, None, None], 0, out).astype(out_dtype)
    return out, jnp.where(is_padding[:, None], -jnp.inf, lse).T


def _lengths(
    cu_seqlens_q: Array, cu_seqlens_k: Array | None, seqused_k: Array | None
) -> tuple[Lengths, Array]:
    """Lengths, and where packed keys start."""
    starts = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    key = starts[1:] - starts[:-1] if seqused_k is None else seqused_k
    query = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    lengths = Lengths(cu_seqlens_q[:-1], query, key)
    return jax.tree.map(lambda x: x.astype(jnp.int32), (lengths, starts[:-1]))


def _tile_sizes(longest: int, group_size: int, config: Config) -> tuple[int, ...]:
    """Tokens of a tile, a power of two: of short sequences, then of the others if there are any."""
    if longest <= SHORT:
        return (1 << (longest - 1).bit_length(),)
    most = max(1, config.tile_rows // group_size)
    most = 1 << (most.bit_length() - 1)
    return 1, max(SUBLANES, min(most, 1 << (longest - 1).bit_length()))


def _block_k(pages: Pages, config: Config) -> int:
    step = keys_per_step(pages.page_size)
    return max(1, config.block_k // step) * step


def _queries_as_tiles(q: Array, cut: Cut, num_kv_heads: int) -> Array:
    """(num_tiles, num_kv_heads, rows, head_dim), where row is `g * tile_q + token`."""
    num_tiles, tile_q = cut.token.shape
    tiles = q[cut.token].reshape(num_tiles, tile_q, num_kv_heads, -1, q.shape[-1])
    rows = tiles.transpose(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, -1, q.shape[-1])
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % SUBLANES), (0, 0)))


def _tiles_as_tokens(x: Array, cut: Cut, group_size: int, tile_q: int) -> Array:
    """(num_tiles, num_kv_heads, rows, n) as (total_q, num_heads, n)."""
    num_tiles, num_kv_heads, _, width = x.shape
    x = x[:, :, : group_size * tile_q].reshape(num_tiles, num_kv_heads, group_size, tile_q, width)
    x = x.transpose(0, 3, 1, 2, 4).reshape(num_tiles * tile_q, -1, width)
    return x[cut.tile_of * tile_q + cut.place_of]


def _per_kv_head(descale: Array | None, *, batch: int, num_kv_heads: int) -> Array:
    """One factor for each sequence and KV head, whichever of the three shapes it came in."""
    factor = jnp.float32(1.0) if descale is None else descale.astype(jnp.float32)
    return jnp.broadcast_to(factor, (batch, num_kv_heads))


def _as_rows(values: Array, *, num_kv_heads: int, group_size: int, tile_q: int) -> Array:
    """Values per head (and sequence) as (1 or batch, num_kv_heads, rows, 1)."""
    by_head = values.reshape(-1, num_kv_heads, group_size, 1)
    rows = jnp.broadcast_to(by_head, (*by_head.shape[:3], tile_q))
    rows = rows.reshape(-1, num_kv_heads, group_size * tile_q, 1)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % SUBLANES), (0, 0)))
