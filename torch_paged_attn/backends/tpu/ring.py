"""A ring of buffers in VMEM, into which blocks are copied from HBM before they are used.

A tile visits its blocks one after the other; `turn` is the number of a visit. Copies are started
`num_buffers - 1` blocks ahead of the computation, also those of the next tile and sequence, so that
no tile but a core's first one waits for an empty ring.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from torch_paged_attn.backends.tpu.kernel_arguments import Options, Refs


class Cursor(NamedTuple):
    """Which copy is started next, and which buffer is used next."""

    tile: Array  # of the next copy
    turn: Array  # of the next copy
    slot: Array  # the buffer that is computed on next


@dataclasses.dataclass(frozen=True)
class Ring:
    """The buffers of one kernel; a subclass says what a block is."""

    refs: Refs
    options: Options
    num_tiles: int

    @property
    def num_buffers(self) -> int:
        """Blocks that there is room for."""
        raise NotImplementedError

    @property
    def next_nonempty(self) -> Any:
        """`(num_tiles + cores,)`: for each tile, that tile or else the core's next one that visits
        a block."""
        raise NotImplementedError

    def turns(self, tile: Array) -> Array:
        """How many blocks the tile visits."""
        raise NotImplementedError

    def block(self, tile: Array, turn: Array) -> Array:
        """The block that the tile visits at this turn."""
        raise NotImplementedError

    def _start(self, tile: Array, block: Array, slot: Array) -> None:
        raise NotImplementedError

    def _wait(self, tile: Array, block: Array, slot: Array) -> None:
        raise NotImplementedError

    def run_tile(
        self,
        saved: Any,
        tile: Array,
        is_first: Array,
        use: Callable[[Array, Array, Array], None],
    ) -> None:
        """Call `use(block, slot, turn)` for each block of the tile. The core's first tile
        (`is_first`) fills the ring; `saved`, in SMEM, keeps the cursor from tile to tile.
        """

        @pl.when(is_first)
        def _() -> None:
            for i, value in enumerate(self.fill(tile)):
                saved[i] = value

        def take(turn: Array, cursor: Cursor) -> Cursor:
            block = self.block(tile, turn)
            slot, cursor = self.load_next(cursor, tile, block)
            use(block, slot, turn)
            return cursor

        cursor = Cursor(*(saved[i] for i in range(len(Cursor._fields))))
        for i, value in enumerate(lax.fori_loop(0, self.turns(tile), take, cursor)):
            saved[i] = value

    def fill(self, tile: Array) -> Cursor:
        """Start copies into all buffers but one, from `tile` on, the core's first one."""
        cursor = Cursor(self.next_nonempty[tile], jnp.int32(0), jnp.int32(0))

        def start(slot: Array, cursor: Cursor) -> Cursor:
            return self._advance(cursor, slot)

        return lax.fori_loop(0, self.num_buffers - 1, start, cursor)

    def load_next(self, cursor: Cursor, tile: Array, block: Array) -> tuple[Array, Cursor]:
        """Start one more copy, and wait for this block. Returns the block's buffer and the cursor
        after it."""
        slot = cursor.slot
        free = lax.rem(slot + (self.num_buffers - 1), jnp.int32(self.num_buffers))
        cursor = self._advance(cursor, free)
        self._wait(tile, block, slot)
        return slot, cursor._replace(slot=lax.rem(slot + 1, jnp.int32(self.num_buffers)))

    def _advance(self, cursor: Cursor, slot: Array) -> Cursor:
        """Start the copy of the cursor's block into buffer `slot`. Returns the cursor of the block
        after it."""
        tile = jnp.minimum(cursor.tile, self.num_tiles - 1)

        @pl.when(cursor.tile < self.num_tiles)
        def _() -> None:
            self._start(tile, self.block(tile, cursor.turn), slot)

        turn = cursor.turn + 1
        is_done = turn >= self.turns(tile)
        following = self.next_nonempty[tile + self.options.config.num_cores]
        return cursor._replace(
            tile=jnp.where(is_done, following, cursor.tile), turn=jnp.where(is_done, 0, turn)
        )
