"""The kernel for the gradient of queries: a tile of queries stays in VMEM, and blocks of keys pass
by, as in the forward.

A grid step is a tile of the forward's list. For each piece of keys that it sees, probabilities are
computed anew, and `dq += dx k`: a query's sum is added up over its keys in ascending order. The
gradient of a bias is written at the end of each block.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.kernel_arguments import Options, QueryGradientRefs
from torch_paged_attn.backends.tpu.layout_mask import LayoutMask
from torch_paged_attn.backends.tpu.load_kv import KvLoader
from torch_paged_attn.backends.tpu.masked_subblocks import Pieces, for_heads
from torch_paged_attn.backends.tpu.registers import LANES
from torch_paged_attn.backends.tpu.score_gradients import score_gradients
from torch_paged_attn.backends.tpu.scores import Scores
from torch_paged_attn.backends.tpu.softmax import across, product


def query_gradient_kernel(
    *refs: Any, names: tuple[str, ...], options: Options, num_tiles: int
) -> None:
    """The body that Pallas runs for each tile; `names` are those of `refs` (see
    `launch_gradients.py`)."""
    named = QueryGradientRefs.named(names, refs)
    core, step = pl.program_id(0), pl.program_id(1)
    tile = step * options.config.num_cores + core
    loader = KvLoader(named, options, num_tiles)
    gradient = QueryGradient(named, loader, options, tile)
    sizes = named.dq_acc.shape[:2]
    for_heads(sizes, gradient.begin)
    loader.run_tile(named.cursor, tile, step == 0, gradient.attend_block)
    for_heads(sizes, gradient.finish)


@dataclasses.dataclass(frozen=True)
class QueryGradient:
    """One tile of queries against the blocks of keys that it sees."""

    refs: QueryGradientRefs
    loader: KvLoader
    options: Options
    tile: Array

    def begin(self, heads: list[Any]) -> None:
        """Set sums to zero, and transpose the rows' statistics from lanes to sublanes."""
        refs = self.refs
        num_heads = refs.dq_acc.shape[0]
        for head in heads:
            refs.dq_acc[head] = jnp.zeros(refs.dq_acc.shape[1:], jnp.float32)
            for i in (head, num_heads + head):
                refs.columns[i] = _as_column(refs.statistics[0, pl.ds(i, 1), :])

    def finish(self, heads: list[Any]) -> None:
        """Write the gradients of some heads."""
        refs = self.refs
        for head in heads:
            dq = refs.dq_acc[head] * self.options.softmax_scale
            refs.dq[0, head] = dq.astype(refs.dq.dtype)

    def attend_block(self, block: Array, slot: Array, turn: Array) -> None:
        """Add what the block of keys in buffer `slot` gives; it is number `turn` of those that the
        tile visits."""
        first = block * self.loader.block_k

        def attend(place: Array, width: int, _layout: LayoutMask | None, masked: bool) -> None:
            self._attend(first, slot, place, width, masked)

        walk = functools.partial(Pieces(self.refs, self.options, self.tile).walk, first, None)
        refs = self.refs
        if refs.dbias is None:
            walk(attend)
            return
        refs.dbias_buffer[...] = jnp.zeros_like(refs.dbias_buffer)
        walk(attend)
        columns = pl.ds(pl.multiple_of(first, self.options.block_k), self.options.block_k)
        copy = pltpu.make_async_copy(
            refs.dbias_buffer, refs.dbias.at[self.tile, :, :, columns], refs.dbias_done
        )
        copy.start()
        copy.wait()

    def _attend(self, first: Array, slot: Array, place: Array, width: int, masked: bool) -> None:
        """Add what piece number `place` of a block gives, of `width` keys. `first`: the block's
        first key; `masked`: whether some scores do not count."""
        refs, loader, options = self.refs, self.loader, self.options
        num_heads, rows = refs.dq_acc.shape[:2]
        piece = Scores.of_piece(refs, options, self.tile, first + place * width, (rows, width))

        def attend_heads(heads: list[Any]) -> None:
            biases = [
                loader.bias_of(slot, head, place, width) if refs.bias is not None else None
                for head in heads
            ]
            keys, values = (
                [loader.piece_of(buffers, slot, place, width, head) for head in heads]
                for buffers in (refs.k_buffers, refs.v_buffers)
            )
            masks: list[Any] = [None] * len(heads)
            if masked:
                # without a bias, the masks of all heads are equal
                masks = [
                    piece.visible(head, place, width, None, bias)
                    for head, bias in zip(heads, biases, strict=True)
                ]
                seen = [piece.is_seen(visible, refs.bias is not None) for visible in masks]
                keys = [jnp.where(x, k, jnp.zeros_like(k)) for x, k in zip(seen, keys, strict=True)]
            products = [product(refs.q[0, h], k, 1) for h, k in zip(heads, keys, strict=True)]
            dp = [product(refs.dout[0, h], v, 1) for h, v in zip(heads, values, strict=True)]
            for i, head in enumerate(heads):
                lse = across(refs.columns[head], width)
                delta = across(refs.columns[num_heads + head], width)
                found = score_gradients(
                    piece, head, products[i], dp[i], lse, delta, biases[i], masks[i]
                )
                if refs.dbias is not None:
                    of_bias = head if refs.dbias_buffer.shape[0] > 1 else 0
                    columns = pl.ds(pl.multiple_of(place * width, width), width)
                    refs.dbias_buffer[of_bias, :, columns] += found.ds
                dx = found.dx.astype(options.compute_dtype)
                refs.dq_acc[head] += product(dx, keys[i], 0)

        for_heads((num_heads, rows), attend_heads)


def _as_column(row: Array) -> Array:
    """(1, n), n a multiple of LANES, as (n, LANES) with the same number in all lanes."""
    parts = [row[:, first : first + LANES] for first in range(0, row.shape[1], LANES)]
    squares = [jnp.broadcast_to(part, (LANES, LANES)).T for part in parts]
    return squares[0] if len(squares) == 1 else jnp.concatenate(squares, axis=0)
