"""Sizes of tiles and blocks: the caller's, else those for the chip, else those for any chip."""

import dataclasses
from typing import Any

import jax

from torch_paged_attn.backends.tpu.registers import LANES

MIB = 2**20

# heads that are computed on together, and their rows, at most: the latencies of heads hide one
# another, and their scores lie in VMEM together
MOST_HEADS = 8
MOST_ROWS = 4096

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

    def bytes_of_launch(
        self,
        num_kv_heads: int,
        widths: tuple[int, int],
        sizes: tuple[int, int],
        of_bias: tuple[int, int] = (0, 1),
        fold: int = 1,
    ) -> tuple[int, int, int]:
        """What a tile, the blocks in flight, and scores with a bias take of VMEM.

        `widths`: numbers of a row of keys and of values. `sizes`: bytes of a number that is
        computed on, and of one that is stored. `of_bias`: how many heads of a bias a block loads, 0
        without one, and how many rows of a tile share a row of it. `fold`: keys of a row of memory,
        for each of which a tile holds its queries once.
        """
        width, width_v = (-(-n // LANES) * LANES for n in widths)
        computed, stored = sizes
        # q and out twice, for the next tile's are loaded meanwhile; the softmax's state once
        row = 2 * computed * (fold * width + width_v) + 4 * fold * (2 * LANES + width_v)
        tile = num_kv_heads * self.tile_rows * row
        block_rows = self.num_buffers * num_kv_heads * self.block_k // fold
        block = block_rows * stored * (width + width_v)
        in_flight = min(num_kv_heads, MOST_HEADS) * self.tile_rows
        scores = min(max(MOST_ROWS, self.tile_rows), in_flight) * self.step_k * (4 + computed)
        bias_heads, group_size = of_bias
        bias_rows = bias_heads * (self.tile_rows // group_size) * (self.num_buffers + 1)
        return tile, block, scores + 4 * bias_rows * self.block_k

    def fit(self, *launch: Any) -> "Config":
        """Sizes with which a launch fits VMEM: tiles of queries and blocks of keys are halved, and
        then the number of buffers is reduced, until it does or all are the smallest. Arguments are
        those of `bytes_of_launch`.
        """
        tile, block, rest = self.bytes_of_launch(*launch)
        if tile + block + rest <= self.vmem_bytes:
            return self
        if self.tile_rows > LEAST_ROWS and (tile >= block or self.block_k <= LEAST_KEYS):
            smaller = dataclasses.replace(self, tile_rows=self.tile_rows // 2)
        elif self.block_k > LEAST_KEYS:
            block_k = self.block_k // 2
            smaller = dataclasses.replace(self, block_k=block_k, step_k=min(self.step_k, block_k))
        elif self.num_buffers > LEAST_BUFFERS:
            smaller = dataclasses.replace(self, num_buffers=self.num_buffers - 1)
        else:
            return self
        return smaller.fit(*launch)

    def parts_of_heads(self, num_kv_heads: int, *rest: Any) -> int:
        """In how many parts the KV heads fit VMEM, each with tiles of its own. Arguments are those
        of `bytes_of_launch`.

        1 if they fit together. If not, the parts are so small that tiles are not halved: all heads'
        keys are read once for each tile's tokens.
        """
        parts = 1
        while True:
            heads = num_kv_heads // parts
            smaller = self.fit(heads, *rest)
            fits = sum(smaller.bytes_of_launch(heads, *rest)) <= self.vmem_bytes
            if heads % 2 or (fits and (parts == 1 or smaller.tile_rows == self.tile_rows)):
                return parts
            parts *= 2

    def with_longer_blocks(self, rows: int, *launch: Any) -> "Config":
        """These sizes with blocks of twice as many keys, if such a block, computed on as a whole,
        fits VMEM beside tiles of `rows` rows; else these. Other arguments are those of
        `bytes_of_launch`.
        """
        block_k = 2 * self.block_k
        longer = dataclasses.replace(self, block_k=block_k, step_k=block_k, tile_rows=rows)
        fits = longer.fit(*launch) == longer
        return dataclasses.replace(self, block_k=block_k) if fits else self

    def fit_backward(
        self,
        num_kv_heads: int,
        widths: tuple[int, int],
        computed: int,
        least_rows: int,
        more_floats: int = 0,
    ) -> "Config | None":
        """Sizes with which both kernels of the backward fit VMEM: tiles are halved until they do;
        None if the smallest do not.

        `widths` is as in `bytes_of_launch`; `computed`: bytes of a number that is computed on;
        `least_rows`: of a tile of queries; `more_floats`: how many floats more options of the call
        keep for each score.
        """
        width = sum(-(-n // LANES) * LANES for n in widths)
        width_q = -(-widths[0] // LANES) * LANES
        tile_rows = max(self.tile_rows, least_rows)
        # what stays is there twice, since the next tile's is loaded meanwhile, and its sums once in
        # float32
        query = tile_rows * (2 * computed * (width + width_q) + 4 * (width_q + 2 * LANES))
        key = self.block_k * (4 * computed * width + 4 * width)
        passing = [n * self.num_buffers * computed * width for n in (self.block_k, tile_rows)]
        tiles = num_kv_heads * max(query + passing[0], key + passing[1])
        in_flight = min(num_kv_heads, MOST_HEADS) * tile_rows
        of_score = 8 + 2 * computed + 4 * more_floats
        scores = min(max(MOST_ROWS, tile_rows), in_flight) * self.step_k * of_score
        if tiles + scores <= self.vmem_bytes:
            return self
        if self.tile_rows > least_rows and (query >= key or self.block_k <= LEAST_KEYS):
            smaller = dataclasses.replace(self, tile_rows=self.tile_rows // 2)
        elif self.block_k > LEAST_KEYS:
            block_k = self.block_k // 2
            smaller = dataclasses.replace(self, block_k=block_k, step_k=min(self.step_k, block_k))
        else:
            return None
        return smaller.fit_backward(num_kv_heads, widths, computed, least_rows, more_floats)

    def with_bias(self, tile_rows: int = 128, block_k: int = 256) -> "Config":
        """Smaller sizes for a call with a bias: a block loads a float of it for each score."""
        block_k = min(self.block_k, block_k)
        step_k = min(self.step_k, block_k)
        return dataclasses.replace(self, block_k=block_k, step_k=step_k, tile_rows=tile_rows)


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
