"""No copy of a cache, ever: nothing that XLA does around the kernels grows with the cache.

Each family is compiled, a cache write and attention behind it, for two numbers of pages. What runs
outside our kernels has to have results as large and take as many cycles, as XLA estimates them, for
both; an operation that reads, writes or copies a cache would take twice as many for the larger.
"""

import dataclasses
import math
import os
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contenders import config_for
from generations import GENERATIONS
from jax import ShapeDtypeStruct
from jax.sharding import SingleDeviceSharding
from operations import read_operations

from torch_paged_attn.backends.tpu.cache_write import (
    reshape_and_cache,
    reshape_and_cache_split,
)
from torch_paged_attn.backends.tpu.functions import blocksparse, flash_varlen
from torch_paged_attn.backends.tpu.pages import heads_first, packed_shape

BATCH, KEYS = 4, 1024
# both are far larger than all else, and multiples of 128, which XLA likes to have in the lanes
PAGES = 4096, 8192

# bytes of a result, cycles, bytes of temporaries for each byte of the cache; a copy: 1, 0.01 and 1
MOST = np.array([1e-3, 1e-5, 1e-3])


@dataclasses.dataclass(frozen=True)
class Family:
    """A cache, how it is held, and the call that reads it."""

    head_dim: int = 128
    page_size: int = 16
    queries: int = 1  # tokens of each sequence
    dtype: Any = jnp.bfloat16
    # "whole": keys and values as one tensor, as views of one storage are; "two" tensors; "nhd": one
    # with slots before heads whose memory has heads first; "shared": values are within the keys
    held: str = "whole"
    head_dim_v: int | None = None
    num_heads: int = 32
    num_kv_heads: int = 8
    is_written: bool = True
    is_packed: bool = True  # in rows of whole lanes
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def of_q(self) -> Any:
        of_cache = {jnp.float32: jnp.float32, jnp.int16: jnp.float16, jnp.float16: jnp.float16}
        return of_cache.get(self.dtype, jnp.bfloat16)


FEATURES = {"softcap": 30.0, "window_size_left": 1000, "sinks": True, "alibi_slopes": True}
NARROW = {"k_descale": True, "v_descale": True}

LATENT: dict[str, Any] = {
    "held": "shared", "head_dim_v": 512, "num_kv_heads": 1, "is_written": False
}  # fmt: skip

FAMILIES = {
    # head_dim 128, by what is done
    "decode": Family(),
    "decode_page128": Family(page_size=128),
    "decode_mqa": Family(num_kv_heads=1),
    "decode_of_4_heads": Family(num_heads=4, num_kv_heads=1),
    "decode_features": Family(options=FEATURES),
    "speculative": Family(queries=4),
    "mixed": Family(queries=100),
    "chunk": Family(queries=512),
    "bias": Family(queries=20, options={"attn_bias": True}),
    "dropout": Family(options={"dropout_p": 0.1}),
    "blocksparse": Family(queries=20, options={"layout": True}),
    # by what is stored
    "fp32": Family(dtype=jnp.float32),
    "fp16": Family(dtype=jnp.int16),
    "mixed_fp16": Family(dtype=jnp.int16, queries=100),
    "e4m3": Family(page_size=32, dtype=jnp.float8_e4m3fn, options=NARROW),
    "int8": Family(page_size=32, dtype=jnp.int8, options=NARROW),
    # by the width of rows
    "d8": Family(8, page_size=128),
    "d8_page256": Family(8, page_size=256),
    "d16": Family(16, page_size=64),
    "d32": Family(32, page_size=64),
    "d64": Family(64),
    "d72": Family(72),
    "d80": Family(80),
    "d96": Family(96),
    "d192": Family(192),
    "d256": Family(256),
    "d512": Family(512),
    "mixed_d8": Family(8, page_size=128, queries=100),
    "mixed_d16": Family(16, page_size=64, queries=100),
    "mixed_d64": Family(64, page_size=32, queries=100),
    "mixed_d80": Family(80, queries=100),
    "mixed_d256": Family(256, queries=100),
    "d64_bias": Family(64, queries=20, options={"attn_bias": True}),
    "d64_dropout": Family(64, options={"dropout_p": 0.1}),
    "d64_blocksparse": Family(64, queries=20, options={"layout": True}),
    "d64_fp16": Family(64, dtype=jnp.int16),
    # by how it is held
    "two": Family(held="two"),
    "mixed_two": Family(held="two", queries=100),
    "two_d64": Family(64, held="two"),
    "two_192_128": Family(192, held="two", head_dim_v=128),
    "mixed_192_128": Family(192, held="two", head_dim_v=128, queries=100),
    "two_192_128_bias": Family(192, held="two", head_dim_v=128, options={"attn_bias": True}),
    "nhd": Family(held="nhd"),
    "mixed_nhd": Family(held="nhd", queries=100),
    "nhd_d256": Family(256, held="nhd"),
    "latent": Family(576, num_heads=128, **LATENT),
    "mixed_latent": Family(576, num_heads=16, queries=100, **LATENT),
    # pages that are no whole number of tiles, of which live keys are copied
    "odd_page": Family(page_size=8, is_written=False),
    "odd_page_d80": Family(80, page_size=8, is_written=False),
}

# what docs/tpu.md names: rows that fill no lanes, float16 itself, slots before heads as they come
COPIED = {
    "d64_as_it_comes": Family(64, is_packed=False),
    "d80_as_it_comes": Family(80, is_packed=False),
    "float16": Family(dtype=jnp.float16),
    "nhd_as_it_comes": Family(held="nhd_as_it_comes"),
}

# each family for one generation, or for all of them with the profile `thorough`
JOBS = [
    pytest.param(family, generation, id=f"{family}/{generation.name}")
    for i, family in enumerate(FAMILIES)
    for j, generation in enumerate(GENERATIONS.values())
    if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" or (i + j) % len(GENERATIONS) == 0
]


def _call(family, config):
    op = blocksparse if "layout" in family.options else flash_varlen
    values = {name: x for name, x in family.options.items() if x is not True}

    def call(caches, new, slots, tensors):
        if family.held.startswith("nhd"):
            caches = tuple(cache.swapaxes(2, 3) for cache in caches)
        if family.is_written:
            write = reshape_and_cache if len(caches) == 1 else reshape_and_cache_split
            written = write(*new, *caches, slots)
            caches = written if len(caches) == 2 else (written,)
        k, v = caches if len(caches) == 2 else (*caches, None)
        if family.held == "shared":
            v = jnp.zeros((0, *k.shape[1:3], family.head_dim_v), k.dtype)
        results = op(
            k=k, v=v, **tensors, max_seqlen_q=family.queries, causal=True, config=config, **values
        )
        if family.held.startswith("nhd"):
            caches = tuple(cache.swapaxes(2, 3) for cache in caches)
        return caches, results

    return call


def _tensors(family, array):
    """The call's tensors but for its cache."""
    of_heads = array((family.num_heads,), jnp.float32)
    of_kv_heads = array((BATCH, family.num_kv_heads), jnp.float32)
    total_q = BATCH * family.queries
    known = {
        "sinks": of_heads,
        "alibi_slopes": of_heads,
        "k_descale": of_kv_heads,
        "v_descale": of_kv_heads,
        "attn_bias": array((1, total_q, KEYS), jnp.bfloat16),
    }
    tensors = {name: x for name, x in known.items() if name in family.options}
    if "dropout_p" in family.options:
        tensors["rng_state"] = array((3,), jnp.uint32)
    if "layout" in family.options:
        rows = KEYS // 64
        tensors["crow_indices"] = array((1, rows + 1), jnp.int32)
        tensors["col_indices"] = array((1, 2 * rows), jnp.int32)
    return tensors | {
        "q": array((total_q, family.num_heads, family.head_dim), family.of_q),
        "cu_seqlens_q": array((BATCH + 1,), jnp.int32),
        "seqused_k": array((BATCH,), jnp.int32),
        "block_table": array((BATCH, KEYS // family.page_size), jnp.int32),
    }


def compile_family(family, generation, num_pages):
    """Bytes of the cache, of the largest result around the kernels, cycles of all of them, bytes of
    temporaries.
    """
    with aot.target(generation) as device:
        here = SingleDeviceSharding(device)
        there = heads_first(here) if family.held == "nhd" else here

        def array(shape, dtype, place=here):
            return ShapeDtypeStruct(shape, dtype, sharding=place)

        page = family.num_kv_heads, family.page_size
        widths = family.head_dim, family.head_dim_v or family.head_dim
        caches = [(num_pages, *page, width) for width in widths]
        if family.is_packed:
            caches = [packed_shape(cache) for cache in caches]
        if family.held == "whole":
            caches = [(2, *caches[0])]
        elif family.held.startswith("nhd"):
            caches = [(2, num_pages, family.page_size, family.num_kv_heads, family.head_dim)]
        elif family.held == "shared":
            caches = caches[:1]
        total_q = BATCH * family.queries
        arguments = (
            tuple(array(shape, family.dtype, there) for shape in caches),
            tuple(array((total_q, page[0], width), family.of_q) for width in widths),
            array((total_q,), jnp.int32),
            _tensors(family, array),
        )
        places = {"in_shardings": (there, here, here, here), "out_shardings": (there, here)}
        call = _call(family, config_for(generation))
        program = jax.jit(call, donate_argnums=0, **places)
        compiled = program.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    operations = read_operations(compiled.as_text(), "")
    assert any(operation.is_kernel for operation in operations)
    around = [operation for operation in operations if not operation.is_kernel]
    return np.array([
        sum(math.prod(x.shape) * x.dtype.itemsize for x in arguments[0]),
        max(x.result_bytes for x in around),
        sum(x.cycles or 0 for x in around),
        compiled.memory_analysis().temp_size_in_bytes,
    ])  # fmt: skip


def _growing(family, generation):
    """For each byte that the cache grows by: bytes of a result, cycles, bytes of temporaries."""
    smaller, larger = (compile_family(family, generation, num_pages) for num_pages in PAGES)
    cache, *rest = larger - smaller
    return np.array(rest) / cache


@pytest.mark.parametrize(("family", "generation"), JOBS)
def test_nothing_around_the_kernels_grows_with_the_cache(family, generation):
    # small operations, and where temporaries lie, differ a little from one program to the next
    assert (_growing(FAMILIES[family], generation) < MOST).all()


@pytest.mark.parametrize("family", COPIED)
def test_what_is_copied_is_seen_and_known(family):
    """The limits that docs/tpu.md states; it is also what shows that a copy would be seen."""
    assert (_growing(COPIED[family], GENERATIONS["v5e"]) > 100 * MOST).all()
