"""Batches of sequences over a paged cache, and the named ones that whole programs are counted for.

Tables have values, since they decide what a kernel does; tensors have shapes only.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct

LEAST_SLOTS = 1 << 18  # 1 GiB of Llama-3-8B's keys and values in one layer


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences over a paged cache, pages in random order; those of one query first."""

    keys: tuple[int, ...]
    queries: tuple[int, ...]
    page_size: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    window: int = -1  # keys to the left that a query sees
    has_sinks: bool = False
    stored: Any = jnp.bfloat16  # the type of the cache

    @classmethod
    def equal(
        cls, sequences: int, keys: int, queries: int, page_size: int, **others: Any
    ) -> "Batch":
        return cls((keys,) * sequences, (queries,) * sequences, page_size, **others)

    @property
    def sequences(self) -> int:
        return len(self.keys)

    @property
    def tokens(self) -> int:
        return sum(self.queries)

    @property
    def num_pages(self) -> int:
        """Of a cache that is larger than VMEM, as any is that serves."""
        return max(sum(self._pages), LEAST_SLOTS // self.page_size)

    @property
    def _pages(self) -> list[int]:
        return [-(-keys // self.page_size) for keys in self.keys]

    @property
    def live_bytes(self) -> int:
        """What has to cross HBM whatever the kernel: keys that some query sees, their values."""
        seen = [
            keys if self.window < 0 else min(keys, self.window + queries)
            for keys, queries in zip(self.keys, self.queries, strict=True)
        ]
        row = self.num_kv_heads * self.head_dim * jnp.dtype(self.stored).itemsize
        return 2 * sum(seen) * row

    @property
    def q(self) -> ShapeDtypeStruct:
        return ShapeDtypeStruct((self.tokens, self.num_heads, self.head_dim), jnp.bfloat16)

    @property
    def new_keys(self) -> ShapeDtypeStruct:
        return ShapeDtypeStruct((self.tokens, self.num_kv_heads, self.head_dim), jnp.bfloat16)

    @property
    def sinks(self) -> ShapeDtypeStruct | None:
        return ShapeDtypeStruct((self.num_heads,), jnp.float32) if self.has_sinks else None

    @property
    def cache(self) -> ShapeDtypeStruct:
        """As the op has it; rows of less than 128 numbers are packed to whole lanes."""
        row = self.page_size * self.head_dim // 128, 128
        page = (
            self.num_kv_heads,
            *(row if self.head_dim < 128 else (self.page_size, self.head_dim)),
        )
        return ShapeDtypeStruct((2, self.num_pages, *page), self.stored)

    @property
    def scales_by_token(self) -> ShapeDtypeStruct:
        """Of keys or of values: one for each token and head of the cache."""
        shape = self.num_pages, self.num_kv_heads, self.page_size
        return ShapeDtypeStruct(shape, jnp.float32)

    @property
    def cu_seqlens(self) -> np.ndarray:
        return np.append(0, np.cumsum(self.queries)).astype(np.int32)

    @property
    def seqused_k(self) -> np.ndarray:
        return np.array(self.keys, np.int32)

    @property
    def block_table(self) -> np.ndarray:
        ids = np.random.default_rng(0).permutation(self.num_pages).astype(np.int32)
        table = np.zeros((self.sequences, max(self._pages)), np.int32)
        first = 0
        for row, pages in zip(table, self._pages, strict=True):
            row[:pages] = ids[first : first + pages]
            first += pages
        return table

    @property
    def slot_mapping(self) -> np.ndarray:
        """Where the keys of the queries' tokens go: the last ones of each sequence."""
        slots = []
        for row, keys, queries in zip(self.block_table, self.keys, self.queries, strict=True):
            position = np.arange(keys - queries, keys)
            slots.append(
                row[position // self.page_size] * self.page_size + position % self.page_size
            )
        return np.concatenate(slots).astype(np.int32)


_RAGGED = tuple(int(n) for n in np.random.default_rng(1).integers(100, 3000, 16))

# what serves: decodes, those beside a chunk of a prompt, a chunk alone, whole prompts
SERVED = {
    "decode_b64_kv4096_page16": Batch.equal(64, 4096, 1, 16),
    "decode_b64_kv4096_page32": Batch.equal(64, 4096, 1, 32),
    "decode_b64_kv4096_page128": Batch.equal(64, 4096, 1, 128),
    "decode_ragged16_page32": Batch(_RAGGED, (1,) * 16, 32, num_heads=64),
    "mixed_63_and_512_page16": Batch((2048,) * 64, (1,) * 63 + (512,), 16),
    "chunk_512_kv8192_page16": Batch((8192,), (512,), 16),
    "prefill_b2_2048_page16": Batch.equal(2, 2048, 2048, 16),
    "prefill_b2_2048_page128": Batch.equal(2, 2048, 2048, 128),
    "gpt_oss_decode_b64_kv4096_page16": Batch.equal(
        64, 4096, 1, 16, num_heads=64, head_dim=64, window=127, has_sinks=True
    ),
}
