"""What a call's launches are compiled for: sizes of tiles and blocks, and how tokens are read."""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from torch_paged_attn.backends.tpu.call import Call
from torch_paged_attn.backends.tpu.config import Config
from torch_paged_attn.backends.tpu.dtypes import compute_dtype_of
from torch_paged_attn.backends.tpu.kernel_arguments import Options
from torch_paged_attn.backends.tpu.layout_mask import WORD
from torch_paged_attn.backends.tpu.pages import Pages, keys_per_step, lay_out_pages
from torch_paged_attn.backends.tpu.registers import LANES, SUBLANES, numbers_of_word
from torch_paged_attn.backends.tpu.scalar_memory import MOST_WORDS
from torch_paged_attn.backends.tpu.tiles import Lengths

# up to this many tokens of a sequence, all of them are one tile
SHORT = 8


def plan(
    call: Call,
    config: Config,
    *,
    lengths: Lengths,
    first_key: Array,
    interpret: Any,
    layouts: int = 1,
) -> tuple[Pages, list[Options]]:
    """The keys, and what the call's launches are compiled for.

    A tile has all heads, or a part of them if these do not fit VMEM together. Where `layouts` is
    above 1, it has those of one of so many layouts.
    """
    layout, bias = call.layout, call.attn_bias
    if bias is not None and bias.shape[0] > 1:  # a block loads each head's
        config = config.with_bias(256, 512)
    widest = 2 * config.block_k if layout is None else WORD * layout.k_block_size
    pages = lay_out_pages(call, lengths, first_key, widest_step=widest)
    rest = (  # what decides, besides the heads, how much VMEM a launch takes
        pages.widths,
        (compute_dtype_of(call.q.dtype).itemsize, pages.k.dtype.itemsize),
        (0 if bias is None else bias.shape[0], call.group_size),
        pages.fold,
    )
    longest, apart = call.max_seqlen_q or call.total_q, layouts
    if layouts == 1:
        # a tile of few tokens has fewer rows than `config` says
        rows = SUBLANES * call.group_size if longest <= SHORT else config.tile_rows
        tiles = dataclasses.replace(config, tile_rows=min(config.tile_rows, rows))
        apart = tiles.parts_of_heads(call.num_kv_heads, *rest)
    config = config.fit(max(1, call.num_kv_heads // apart), *rest)
    tile_sizes = _tile_sizes(longest, call.group_size, config)
    return pages, [
        _options_of_pages(call, config, pages, tile_q, interpret, apart) for tile_q in tile_sizes
    ]


def _tile_sizes(longest: int, group_size: int, config: Config) -> tuple[int, ...]:
    """Tokens of a tile, powers of two: for sequences of one token and for longer ones, or one size
    for both if none is longer than `SHORT`.
    """
    if longest <= SHORT:
        # loads with strides, which spare XLA all glue, are of whole registers
        return (1 if longest == 1 else SUBLANES,)
    most = max(1, config.tile_rows // group_size)
    most = 1 << (most.bit_length() - 1)
    return 1, max(2 * SHORT, min(most, 1 << (longest - 1).bit_length()))


def _options_of_pages(
    call: Call, config: Config, pages: Pages, tile_q: int, interpret: Any, apart: int
) -> Options:
    """`choose_options`, with longer blocks for decodes whose KV heads are all in one stack.

    No other head's work hides the latencies of a step then: fewer, longer steps have fewer of them
    (16 sequences of 4096 latent keys, TPU7x: 176 thousand bundles by blocks of 1024, 157 by 2048).
    """
    choose = functools.partial(
        choose_options, call, page_size=pages.page_size, tile_q=tile_q, interpret=interpret,
        fold=pages.fold, apart=apart,
    )  # fmt: skip
    options = choose(config)
    is_plain = call.layout is None and call.attn_bias is None and call.dropout_p == 0.0
    is_long = pages.table_stride * pages.page_size > config.block_k
    if tile_q <= SHORT and options.stack == call.num_kv_heads and is_plain and is_long:
        sizes = options.compute_dtype.itemsize, pages.k.dtype.itemsize
        rows = options.group_size * tile_q
        longer = config.with_longer_blocks(rows, call.num_kv_heads, pages.widths, sizes)
        options = choose(longer)
    return dataclasses.replace(options, table_stride=pages.table_stride)


def choose_options(
    call: Call, config: Config, page_size: int, tile_q: int, interpret: Any, fold: int = 1,
    apart: int = 1,
) -> Options:  # fmt: skip
    """What the kernel of tiles of `tile_q` tokens is compiled for. A row of keys holds `fold`; a
    tile has the heads of one part of `apart`.
    """
    layout = call.layout
    block_sizes, most_k = (1, 1), config.block_k
    if layout is not None:
        block_sizes = layout.q_block_size, layout.k_block_size
        most_k = min(most_k, WORD * layout.k_block_size)
    group_size, stack = call.num_heads // max(apart, call.num_kv_heads), 1
    if fold == 1 and apart <= call.num_kv_heads:
        per_tile = call.num_kv_heads // apart
        stack = math.gcd(per_tile, max(1, SUBLANES // (group_size * tile_q)))
        group_size *= stack
    unit = math.lcm(keys_per_step(page_size, fold), block_sizes[1])
    if tile_q <= SHORT and call.window.left >= 0:
        # all pages of a block are walked, those that a window hides, too
        most_k = min(most_k, -(-(call.window.left + tile_q) // unit) * unit)
    block_k = max(1, most_k // unit) * unit
    step_k = max(1, config.step_k // unit) * unit if tile_q > SHORT else block_k
    block_k = block_k // step_k * step_k
    return Options(
        tile_q=tile_q,
        group_size=group_size,
        stack=stack,
        block_k=block_k,
        step_k=step_k,
        masked_step_k=_halved(step_k, unit, config.step_k),
        config=config,
        softmax_scale=call.scale,
        softcap=float(call.softcap),
        window=call.window,
        dropout_p=float(call.dropout_p),
        head_splits=apart,
        block_sizes=block_sizes,
        compute_dtype=compute_dtype_of(call.q.dtype),
        # 8 bits saturate, float16 has no instructions: both are rounded to by XLA
        out_dtype=jnp.dtype(jnp.bfloat16 if call.result_dtype == jnp.bfloat16 else jnp.float32),
        interpret=interpret,
        fold=fold,
    )


def _halved(step_k: int, unit: int, most: int) -> int:
    """Keys of half a step, halved again until there are `most`; of more, or of the whole step, if
    halves are no multiple of `unit`.
    """
    while step_k % (2 * unit) == 0:
        step_k //= 2
        if step_k <= most:
            break
    return step_k


def reads_tokens(call: Call, pages: Pages, options: Options) -> bool:
    """Whether a launch reads queries and writes results where they lie (`q_out_dma.py`)."""
    slopes, layout, tile_q = call.alibi_slopes, call.layout, options.tile_q
    rows = options.group_size * tile_q
    is_one_bias = call.attn_bias is None or call.attn_bias.shape[0] == 1
    if layout is not None:
        # its words lie in the scalar core's memory, beside each tile's blocks and the page ids
        num_tiles = (call.total_q + call.batch * (tile_q - 1)) // tile_q
        num_tiles = min(num_tiles, call.batch) if tile_q == 1 else num_tiles
        numbers = layout.num_words(options.block_k) + pages.table.size
        numbers += num_tiles * layout.num_blocks(options.block_k)
        if 2 * numbers > MOST_WORDS:
            return False
    return (
        options.head_splits == 1
        and all(width % LANES == 0 for width in pages.widths)
        and pages.widths[1] <= pages.widths[0]
        and call.num_heads <= LANES
        and options.compute_dtype == options.out_dtype
        and (slopes is None or slopes.ndim == 1)
        # rows of one token that fill no registers are padded
        and (rows * pages.fold % SUBLANES == 0 or (tile_q == 1 and pages.fold == 1 and is_one_bias))
        # loads with strides are of words of 32 bits, with the numbers of several heads
        and (tile_q == 1 or call.num_heads % numbers_of_word(options.compute_dtype) == 0)
    )
