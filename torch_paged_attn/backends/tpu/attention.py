"""What `flash_varlen` and `blocksparse` share: from an op's arguments to tiles, launches, and back.

Prefill and decode of one batch run as two launches of one kernel: sequences of one token in tiles
of one token, the others in long ones. No value is read on the host, and lengths that change do not
compile anything anew.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from torch_paged_attn.backends.tpu.attention_kernel import Statics
from torch_paged_attn.backends.tpu.config import Config
from torch_paged_attn.backends.tpu.launch import attend_tiles
from torch_paged_attn.backends.tpu.layout_mask import WORD, Layout, lay_out_tiles
from torch_paged_attn.backends.tpu.pages import keys_per_step, lay_out_pages
from torch_paged_attn.backends.tpu.refusal import refuse
from torch_paged_attn.backends.tpu.softmax import LOG2_E
from torch_paged_attn.backends.tpu.tiles import Cut, Lengths, Window, cut_queries

FLOATS = ("float32", "bfloat16", "float16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
SUBLANES = 8

# int32 that fit into SMEM beside everything else
MOST_ENTRIES = 200_000

# up to this many tokens of a sequence, all of them are one tile
SHORT = 8


@dataclasses.dataclass(frozen=True)
class Heads:
    """How rows of a tile come from heads: `row = g * tile_q + token` for head `g` of a group.

    Stacked KV heads are one here, and their groups one.
    """

    num_kv_heads: int
    group_size: int
    tile_q: int

    def pad(self, rows: Array, value: float = 0.0) -> Array:
        """(..., rows, n) up to whole registers."""
        padding = ((0, 0), (0, 0), (0, -rows.shape[2] % SUBLANES), (0, 0))
        return jnp.pad(rows, padding, constant_values=value)

    def of_tokens(self, x: Array, cut: Cut) -> Array:
        """(total_q, num_heads, n) as (num_tiles, num_kv_heads, rows, n)."""
        num_tiles, tile_q = cut.token.shape
        x = x[cut.token].reshape(num_tiles, tile_q, self.num_kv_heads, self.group_size, -1)
        return self.pad(
            x.transpose(0, 2, 3, 1, 4).reshape(num_tiles, self.num_kv_heads, -1, x.shape[-1])
        )

    def to_tokens(self, x: Array, cut: Cut) -> Array:
        """The way back."""
        num_tiles, num_kv_heads, _, width = x.shape
        x = x[:, :, : self.group_size * self.tile_q]
        x = x.reshape(num_tiles, num_kv_heads, self.group_size, self.tile_q, width)
        x = x.transpose(0, 3, 1, 2, 4).reshape(num_tiles * self.tile_q, -1, width)
        return x[cut.tile_of * self.tile_q + cut.place_of]

    def of_heads(self, values: Array) -> Array:
        """([batch,] num_heads) as (1 or batch, num_kv_heads, rows, 1)."""
        x = values.astype(jnp.float32).reshape(-1, self.num_kv_heads, self.group_size, 1)
        x = jnp.broadcast_to(x, (*x.shape[:3], self.tile_q))
        return self.pad(x.reshape(*x.shape[:2], -1, 1))

    def of_bias(self, bias: Array, cut: Cut, block_k: int) -> Array:
        """(1 or num_heads, total_q, keys) as (num_tiles, 1 or num_kv_heads, rows, whole blocks)."""
        if bias.dtype == jnp.bool_:
            bias = jnp.where(bias, 0.0, -jnp.inf)
        bias = jnp.pad(bias.astype(jnp.float32), ((0, 0), (0, 0), (0, -bias.shape[2] % block_k)))
        x = bias[:, cut.token].swapaxes(0, 1)  # (num_tiles, heads, tile_q, keys)
        num_tiles, heads, _, keys = x.shape
        if heads == 1:
            x = jnp.broadcast_to(x, (num_tiles, self.group_size, self.tile_q, keys))
        # rows that are not there see nothing
        return self.pad(x.reshape(num_tiles, max(1, heads // self.group_size), -1, keys), -jnp.inf)


def attend(
    q: Array,
    k: Array,
    v: Array | None,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    seqused_k: Array | None,
    block_table: Array | None,
    attn_bias: Array | None,
    alibi_slopes: Array | None,
    sinks: Array | None,
    q_descale: Array | None,
    k_descale: Array | None,
    v_descale: Array | None,
    out_scale: Array | None,
    rng_state: Array | None,
    *,
    max_seqlen_q: int | None,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    dropout_p: float,
    out_dtype: Any,
    config: Config,
    interpret: Any,
    layout: Layout | None = None,
) -> tuple[Array, Array]:
    """`flash_varlen` of a call that it can do; `blocksparse` with a layout."""
    op = "flash_varlen" if layout is None else "blocksparse"
    total_q, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1] if block_table is None else k.shape[-3]
    group_size = num_heads // num_kv_heads
    out_dtype = jnp.dtype(out_dtype or q.dtype)
    lengths, first_key = _lengths(cu_seqlens_q, cu_seqlens_k, seqused_k)
    batch = lengths.query.shape[0]
    if total_q == 0 or batch == 0:
        out = jnp.zeros((total_q, num_heads, (k if v is None else v).shape[-1]), out_dtype)
        return out, jnp.full((num_heads, total_q), -jnp.inf, jnp.float32)

    if attn_bias is not None:
        config = config.with_bias()
    widest = 2 * config.block_k if layout is None else WORD * layout.k_block_size
    pages = lay_out_pages(k, v, lengths, first_key, block_table, widest_step=widest)
    if pages.table.size > MOST_ENTRIES:
        refuse(op, f"block_table has {pages.table.size} entries; supported: {MOST_ENTRIES}")
    compute_dtype = jnp.dtype(jnp.bfloat16 if q.dtype.name in FLOAT8 else jnp.float32)
    if q.dtype == jnp.bfloat16:
        compute_dtype = q.dtype
    q = q.astype(compute_dtype)
    heads_of_tile = num_kv_heads if layout is None or layout.num_heads == 1 else 1
    config = config.fit(
        heads_of_tile,
        (head_dim, pages.head_dim_v),
        (compute_dtype.itemsize, pages.k.dtype.itemsize),
    )

    def per_kv_head(descale: Array | None) -> Array:
        factor = jnp.float32(1.0) if descale is None else descale.astype(jnp.float32)
        return jnp.broadcast_to(factor, (batch, num_kv_heads))

    score_scale = out_factor = None
    if q_descale is not None or k_descale is not None:
        score_scale = per_kv_head(q_descale) * per_kv_head(k_descale)
    if v_descale is not None or dropout_p > 0.0:
        out_factor = per_kv_head(v_descale) / (1.0 - dropout_p)
    # heads with a layout each have tiles each
    apart = 1 if layout is None else layout.num_heads
    block_sizes = (1, 1) if layout is None else (layout.q_block_size, layout.k_block_size)
    unit = math.lcm(keys_per_step(pages.page_size), block_sizes[1])
    tile_sizes = _tile_sizes(max_seqlen_q or total_q, group_size, config)
    block_k = max(1, min(config.block_k, widest) // unit) * unit
    statics = Statics(
        tile_q=0,
        group_size=0,
        stack=0,
        block_k=0,
        step_k=0,
        edge_k=0,
        num_buffers=config.num_buffers,
        num_cores=config.num_cores,
        vmem_bytes=config.vmem_bytes,
        softmax_scale=float(head_dim**-0.5 if softmax_scale is None else softmax_scale),
        softcap=float(softcap),
        window=Window(window_size_left, 0 if causal else window_size_right),
        dropout_p=float(dropout_p),
        heads_apart=apart,
        block_sizes=block_sizes,
        compute_dtype=compute_dtype,
        # 8 bits saturate, float16 has no instructions: both are rounded to by XLA
        out_dtype=out_dtype if out_dtype == jnp.bfloat16 else jnp.dtype(jnp.float32),
        interpret=interpret,
    )

    results = []
    is_short = lengths.query <= tile_sizes[0]
    for tile_q in tile_sizes:
        is_whole = len(tile_sizes) > 1 and tile_q == tile_sizes[0]
        cut = cut_queries(
            lengths,
            is_short if is_whole else (~is_short | (len(tile_sizes) == 1)),
            total_q,
            tile_q=tile_q,
            is_whole=is_whole,
            window=statics.window,
            num_cores=config.num_cores,
        )
        heads, stack = Heads(apart, num_heads // apart, tile_q), 1
        if apart == 1:
            stack = math.gcd(num_kv_heads, max(1, SUBLANES // (group_size * tile_q)))
            heads = Heads(num_kv_heads // stack, group_size * stack, tile_q)
        step_k = max(1, config.step_k // unit) * unit if tile_q > SHORT else block_k
        whole_k = block_k // step_k * step_k
        # with a bias every step is masked
        is_halved = attn_bias is None and step_k % (2 * unit) == 0
        tiles, tile_layout = cut.tiles, None
        if layout is not None:
            tiles, tile_layout = lay_out_tiles(
                layout, tiles, tile_q=tile_q, block_k=whole_k, num_cores=config.num_cores
            )
            if tile_layout.visits.size > MOST_ENTRIES:
                refuse(
                    op,
                    f"col_indices of {tile_layout.visits.size} blocks; supported: {MOST_ENTRIES}",
                )
        queries = heads.of_tokens(q, cut)
        out, lse = attend_tiles(
            queries.reshape(-1, queries.shape[1] // apart, *queries.shape[2:]),
            pages,
            tiles,
            dataclasses.replace(
                statics,
                tile_q=tile_q,
                group_size=heads.group_size,
                stack=stack,
                block_k=whole_k,
                step_k=step_k,
                edge_k=step_k // 2 if is_halved else step_k,
            ),
            sinks=None if sinks is None else heads.of_heads(sinks * LOG2_E),
            slopes=None if alibi_slopes is None else heads.of_heads(alibi_slopes * LOG2_E),
            score_scale=score_scale,
            out_factor=out_factor,
            bias=None if attn_bias is None else heads.of_bias(attn_bias, cut, whole_k),
            rng=None if rng_state is None or dropout_p == 0.0 else _rng_words(rng_state),
            layout=tile_layout,
        )
        out = out.reshape(queries.shape[:2] + out.shape[2:])
        lse = lse.reshape(*queries.shape[:2], -1, 1)
        results.append((heads.to_tokens(out, cut), heads.to_tokens(lse, cut)))
    out, lse = results[-1]
    if len(tile_sizes) > 1:
        of_token = jnp.searchsorted(cu_seqlens_q[1:], jnp.arange(total_q), side="right")
        chosen = is_short[jnp.minimum(of_token, batch - 1)][:, None, None]
        out, lse = (jnp.where(chosen, x, y) for x, y in zip(*results, strict=True))
    is_padding = (jnp.arange(total_q) >= cu_seqlens_q[-1])[:, None, None]
    out, lse = jnp.where(is_padding, 0, out), jnp.where(is_padding, -jnp.inf, lse)
    return _to_storage(out, out_dtype, out_scale), lse[..., 0].T


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
    return 1, max(2 * SHORT, min(most, 1 << (longest - 1).bit_length()))


def _rng_words(rng_state: Array) -> Array:
    """Seed's low word, its high word and the offset as int32, from the op's `(2,)` integers.

    JAX has no 64-bit integers unless asked to: three words are taken as they are.
    """
    if rng_state.shape == (3,):
        return lax.bitcast_convert_type(rng_state.astype(jnp.uint32), jnp.int32)
    words = rng_state.dtype.itemsize * 8
    high = rng_state[0] >> 32 if words == 64 else jnp.minimum(rng_state[0], 0)
    return jnp.stack([rng_state[0], high, rng_state[1]]).astype(jnp.int32)


def _to_storage(x: Array, dtype: Any, scale: Array | None) -> Array:
    """Round to nearest even; the 8-bit formats saturate at their largest finite value."""
    if scale is not None:
        x = x / scale.astype(jnp.float32)
    if dtype.name in FLOAT8:
        limit = float(jnp.finfo(dtype).max)
        x = jnp.clip(x.astype(jnp.float32), -limit, limit)
    return x.astype(dtype)
