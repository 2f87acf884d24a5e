"""Sizes of tiles and blocks: the caller's, else those for the chip, else those for any chip; and
what a call's launches are compiled for with them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from torch_paged_attn.backends.tpu.call import Call
from torch_paged_attn.backends.tpu.dtypes import LANES, SUBLANES, compute_dtype_of
from torch_paged_attn.backends.tpu.kernels.arguments import MOST_HEADS, MOST_ROWS, Options
from torch_paged_attn.backends.tpu.kernels.layout_mask import WORD
from torch_paged_attn.backends.tpu.pages import Pages, keys_per_step, lay_out_pages
from torch_paged_attn.backends.tpu.tiles import Lengths

MIB = 2**20

# tiles and blocks are not made smaller than this
LEAST_ROWS = 64
LEAST_KEYS = 128
LEAST_BUFFERS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of one launch. Results with other sizes differ in rounding only."""

    block_k: int = 1024  # keys of a block: fetched together, rounded to whole pages
    step_k: int = 512  # keys of a step of a long tile: computed on together
    num_buffers: int = 3  # blocks in VMEM: one is computed on while the others are loaded
    tile_rows: int = 1024  # query rows (tokens times the group's heads) of a prefill tile
    num_cores: int = 1  # TensorCores that one kernel runs on: 2 on v4 and v5p
    vmem_bytes: int = 100 * MIB  # of VMEM that tiles, blocks and scores may take
    spare_bytes: int = 0  # of VMEM besides these, for what the compiler keeps there

    def fits(self, bytes_of: "Bytes") -> bool:
        """Whether a launch with these sizes fits VMEM."""
        return bytes_of(self)[2] <= self.vmem_bytes

    def fit(self, bytes_of: "Bytes", least_rows: int = LEAST_ROWS) -> "Config":
        """Sizes with which a launch fits VMEM: tiles of queries or blocks of keys, whichever take
        more, are halved, and then there are fewer buffers, until it does or all are the smallest.
        """
        if self.fits(bytes_of):
            return self
        tile, block, _ = bytes_of(self)
        if self.tile_rows > least_rows and (tile >= block or self.block_k <= LEAST_KEYS):
            smaller = dataclasses.replace(self, tile_rows=self.tile_rows // 2)
        elif self.block_k > LEAST_KEYS:
            block_k = self.block_k // 2
            step_k = min(self.step_k, block_k)
            smaller = dataclasses.replace(self, block_k=block_k, step_k=step_k)
        elif self.num_buffers > LEAST_BUFFERS:
            smaller = dataclasses.replace(self, num_buffers=self.num_buffers - 1)
        else:
            return self
        return smaller.fit(bytes_of, least_rows)

    def with_bias(self, tile_rows: int = 128, block_k: int = 256) -> "Config":
        """Smaller sizes for a call with a bias: a block loads a float of it for each score."""
        block_k = min(self.block_k, block_k)
        step_k = min(self.step_k, block_k)
        return dataclasses.replace(self, block_k=block_k, step_k=step_k, tile_rows=tile_rows)


# bytes of VMEM by the sizes of a launch: of tiles of queries, of blocks of keys, and of everything
Bytes = Callable[[Config], tuple[int, int, int]]


def _of_scores(config: Config, num_kv_heads: int, tile_rows: int) -> int:
    """How many scores the heads have that are computed on together."""
    in_flight = min(num_kv_heads, MOST_HEADS) * tile_rows
    return min(max(MOST_ROWS, tile_rows), in_flight) * config.step_k


def forward_bytes(
    num_kv_heads: int, widths: tuple[int, int], sizes: tuple[int, int], of_bias: tuple[int, int],
    fold: int, config: Config,
) -> tuple[int, int, int]:  # fmt: skip
    """Of the forward: a tile, the blocks in flight, and scores with a bias besides.

    `widths`: numbers of a row of keys and of values. `sizes`: bytes of a number that is computed
    on, and of one that is stored. `of_bias`: how many heads of a bias a block loads, 0 without one,
    and how many rows of a tile share a row of it. `fold`: keys of a row of memory, for each of
    which a tile holds its queries once.
    """
    width, width_v = (-(-n // LANES) * LANES for n in widths)
    (computed, stored), (bias_heads, group_size) = sizes, of_bias
    # q and out twice, for the next tile's are loaded meanwhile; the softmax's state once
    row = 2 * computed * (fold * width + width_v) + 4 * fold * (2 * LANES + width_v)
    tile = num_kv_heads * config.tile_rows * row
    block_rows = config.num_buffers * num_kv_heads * config.block_k // fold
    block = block_rows * stored * (width + width_v)
    scores = _of_scores(config, num_kv_heads, config.tile_rows) * (4 + computed)
    bias_rows = bias_heads * (config.tile_rows // group_size) * (config.num_buffers + 1)
    return tile, block, tile + block + scores + 4 * bias_rows * config.block_k


def backward_bytes(
    num_kv_heads: int, widths: tuple[int, int], computed: int, least_rows: int, more_floats: int,
    config: Config,
) -> tuple[int, int, int]:  # fmt: skip
    """Of the larger one of the backward's kernels. `computed`: bytes of a number that is computed
    on; `least_rows`: of a tile of queries; `more_floats`: how many more floats the call's options
    keep for each score.
    """
    width_q, width_v = (-(-n // LANES) * LANES for n in widths)
    width, tile_rows = width_q + width_v, max(config.tile_rows, least_rows)
    # what stays is there twice, since the next tile's is loaded meanwhile, and its sums in float32
    query = tile_rows * (2 * computed * (width + width_q) + 4 * (width_q + 2 * LANES))
    key = config.block_k * (4 * computed * width + 4 * width)
    keys, queries = (n * config.num_buffers * computed * width for n in (config.block_k, tile_rows))
    of_score = 8 + 2 * computed + 4 * more_floats
    scores = _of_scores(config, num_kv_heads, tile_rows) * of_score
    return query, key, num_kv_heads * max(query + keys, key + queries) + scores


# by `device_kind`
CHIPS = {
    "TPU v4": Config(
        block_k=512, step_k=256, tile_rows=128, num_cores=2, vmem_bytes=15 * MIB, spare_bytes=MIB
    ),
    "TPU v5": Config(num_cores=2, vmem_bytes=56 * MIB),
    "TPU v5p": Config(num_cores=2, vmem_bytes=56 * MIB),
    "TPU v5 lite": Config(),
    "TPU v5e": Config(),
    "TPU v6 lite": Config(),
    "TPU v6e": Config(),
    "TPU7x": Config(vmem_bytes=56 * MIB),
}


def choose_config(config: Config | None) -> Config:
    """The caller's sizes, else those for the chip in this machine."""
    if config is not None:
        return config
    kind = jax.devices()[0].device_kind if jax.default_backend() == "tpu" else ""
    return CHIPS.get(kind, Config())


# up to this many tokens of a sequence, all of them are one tile
SHORT = 8


def plan(
    call: Call, config: Config, *, lengths: Lengths, first_key: Array, interpret: Any
) -> tuple[Pages, int, list[Options]]:
    """The keys, in how many parts the heads are launched, and what a part's launches are compiled
    for.
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
    longest = call.max_seqlen_q or call.total_q
    # a tile of few tokens has fewer rows than `config` says
    rows = SUBLANES * call.group_size if longest <= SHORT else config.tile_rows
    tiles = dataclasses.replace(config, tile_rows=min(config.tile_rows, rows))
    # the largest parts of heads that fit together, or for which tiles of a part are not halved
    for parts in _ways_of_heads(call):
        bytes_of = functools.partial(forward_bytes, max(1, call.num_kv_heads // parts), *rest)
        fitting = tiles.fit(bytes_of)
        if fitting.fits(bytes_of) and (parts == 1 or fitting.tile_rows == tiles.tile_rows):
            break
    config = config.fit(bytes_of)
    group_size = call.num_heads // max(parts, call.num_kv_heads)
    launches = [
        _options_of_pages(call, config, pages, tile_q, interpret, parts)
        for tile_q in _tile_sizes(longest, group_size, config)
    ]
    return pages, parts, launches


def _ways_of_heads(call: Call) -> list[int]:
    """In how many parts heads may be launched: each has whole KV heads or is of one, no more heads
    than lse has lanes, and half as many KV heads: of 128, 30 MiB of registers spill into VMEM."""
    heads, kv_heads = call.num_heads, call.num_kv_heads
    ways = [n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= LANES]
    ways = [n for n in ways if kv_heads % n == 0 or n % kv_heads == 0]
    return [n for n in ways if n <= kv_heads <= n * LANES // 2] or ways[:1]


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
    call: Call, config: Config, pages: Pages, tile_q: int, interpret: Any, parts: int
) -> Options:
    """`choose_options`, with longer blocks for decodes whose KV heads are all in one stack.

    No other head's work hides the latencies of a step then: fewer, longer steps have fewer of them
    (16 sequences of 4096 latent keys, TPU7x: 176 thousand bundles by blocks of 1024, 157 by 2048).
    """
    rest = pages.page_size, tile_q, interpret, pages.fold, parts
    options = choose_options(call, config, *rest)
    is_plain = call.layout is None and call.attn_bias is None and call.dropout_p == 0.0
    is_long = pages.table_stride * pages.page_size > config.block_k
    if tile_q <= SHORT and options.stack == call.num_kv_heads and is_plain and is_long:
        sizes = options.compute_dtype.itemsize, pages.k.dtype.itemsize
        rows, block_k = options.group_size * tile_q, 2 * config.block_k
        longer = dataclasses.replace(config, block_k=block_k, step_k=block_k, tile_rows=rows)
        of_launch = call.num_kv_heads, pages.widths, sizes, (0, 1), 1
        if longer.fits(functools.partial(forward_bytes, *of_launch)):
            options = choose_options(call, dataclasses.replace(config, block_k=block_k), *rest)
    return dataclasses.replace(options, table_stride=pages.table_stride)


def choose_options(
    call: Call, config: Config, page_size: int, tile_q: int, interpret: Any, fold: int = 1,
    parts: int = 1,
) -> Options:  # fmt: skip
    """What the kernel of tiles of `tile_q` tokens is compiled for. A row of keys holds `fold`; a
    launch has the heads of one part of `parts`.
    """
    layout = call.layout
    block_sizes, most_k = (1, 1), config.block_k
    if layout is not None:
        block_sizes = layout.q_block_size, layout.k_block_size
        most_k = min(most_k, WORD * layout.k_block_size)
    group_size, stack = call.num_heads // max(parts, call.num_kv_heads), 1
    if fold == 1 and parts <= call.num_kv_heads:
        per_tile = call.num_kv_heads // parts
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
