"""What XLA does around the kernels: no copy of a cache, and no more than the budget has."""

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contenders import PROBLEMS, config_for
from generations import GENERATIONS
from jax import ShapeDtypeStruct, lax
from jax.sharding import SingleDeviceSharding
from operations import read_operations

from torch_paged_attn.backends.tpu.flash_varlen import flash_varlen
from torch_paged_attn.backends.tpu.pages import heads_first, packed_shape
from torch_paged_attn.backends.tpu.reshape_and_cache import (
    reshape_and_cache,
    reshape_and_cache_split,
)

HEADS, KV_HEADS, PAGES = 32, 8, 8192

# head_dim, page_size, tokens of a sequence, dtype of the cache
FAMILIES = {
    "decode": (128, 16, 1, jnp.bfloat16),
    "decode_page128": (128, 128, 1, jnp.bfloat16),
    "decode_d64": (64, 16, 1, jnp.bfloat16),
    "decode_d32": (32, 64, 1, jnp.bfloat16),
    "decode_d80": (80, 16, 1, jnp.bfloat16),
    "decode_d256": (256, 16, 1, jnp.bfloat16),
    "decode_d72": (72, 16, 1, jnp.bfloat16),
    "decode_fp16": (128, 16, 1, jnp.int16),
    "decode_e4m3": (128, 32, 1, jnp.float8_e4m3fn),
    "mixed": (128, 16, 100, jnp.bfloat16),
    "mixed_d64": (64, 32, 100, jnp.bfloat16),
    "mixed_d80": (80, 16, 100, jnp.bfloat16),
    "mixed_fp32": (128, 16, 100, jnp.float32),
}


def _program(head_dim, page_size, queries, dtype, *, is_whole):
    """A cache write and attention behind it, with a cache that is far larger than all else."""
    batch, keys = 4, 1024
    of_q = {jnp.float32: jnp.float32, jnp.int16: jnp.float16}.get(dtype, jnp.bfloat16)
    cache = (2, PAGES, KV_HEADS, page_size, head_dim)[0 if is_whole else 1 :]
    cache = ShapeDtypeStruct(packed_shape(cache), dtype)
    caches = (cache,) if is_whole else (cache, cache)
    new = ShapeDtypeStruct((batch * queries, KV_HEADS, head_dim), of_q)
    q = ShapeDtypeStruct((batch * queries, HEADS, head_dim), of_q)
    generation = GENERATIONS["v5e"]

    def call(caches, new, q, slots, cu_seqlens, lengths, table):
        if is_whole:
            caches = (reshape_and_cache(new, new, *caches, slots),)
        else:
            caches = reshape_and_cache_split(new, new, *caches, slots)
        k, v = caches if len(caches) == 2 else (*caches, None)
        out = flash_varlen(
            q, k, v, cu_seqlens, None, lengths, table, max_seqlen_q=queries, causal=True,
            config=config_for(generation),
        )  # fmt: skip
        return caches, out

    cu_seqlens = np.arange(batch + 1, dtype=np.int32) * queries
    table = ShapeDtypeStruct((batch, keys // page_size), jnp.int32)
    lengths = np.full(batch, keys, np.int32)
    arguments = (caches, new, q, np.arange(batch * queries, dtype=np.int32), cu_seqlens, lengths)
    program = aot.compile_program(jax.jit(call, donate_argnums=0), (*arguments, table), generation)
    return program, cache


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "two"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_operation_touches_as_much_as_a_cache(family, is_whole):
    program, cache = _program(*FAMILIES[family], is_whole=is_whole)
    size = cache.size * cache.dtype.itemsize
    around = [operation for operation in program.operations if not operation.is_kernel]
    assert around
    assert len(program.operations) > len(around)
    large = [x for x in around if x.result_bytes > size // 16]
    assert not large
    assert program.temporary_bytes < size // 16


def test_latent_attention_reads_keys_and_values_as_one():
    [problem] = (known for known in PROBLEMS if known.name.startswith("mla_decode"))
    function, arguments = problem.contenders["ours"](GENERATIONS["v5e"])
    program = aot.compile_program(function, arguments, GENERATIONS["v5e"])
    cache = arguments[1]
    around = [operation for operation in program.operations if not operation.is_kernel]
    assert not [x for x in around if x.result_bytes > cache.size // 16]
    [kernel] = program.kernels
    counts = kernel.counts(GENERATIONS["v5e"])
    rows = problem.live_bytes // 576 * cache.shape[-1]
    assert rows <= counts.hbm_bytes < 1.1 * rows
    # queries are widened in the kernel, and a block of pages ends where the table does
    assert not [x for x in around if "pad" in x.name]


@pytest.mark.parametrize("is_heads_first", [True, False], ids=["heads_first", "as_it_comes"])
def test_slots_before_heads_need_no_copy_where_heads_lie_first(is_heads_first):
    """NHD: an array of another order of axes, whose pages lie as a kernel reads them."""
    generation, batch = GENERATIONS["v5e"], 4

    def call(cache, new, q, slots, cu_seqlens, lengths, table):
        pages = reshape_and_cache(new, new, cache.swapaxes(2, 3), slots)
        out = flash_varlen(
            q, pages, None, cu_seqlens, None, lengths, table, max_seqlen_q=1, causal=True,
            config=config_for(generation),
        )  # fmt: skip
        return pages.swapaxes(2, 3), out

    def tensor(dtype, *shape):
        return ShapeDtypeStruct(shape, dtype, sharding=here)

    with aot.target(generation) as device:
        here = SingleDeviceSharding(device)
        there = heads_first(here) if is_heads_first else here
        counts = (tensor(jnp.int32, n) for n in (batch, batch + 1, batch))
        arguments = (
            ShapeDtypeStruct((2, PAGES, 16, KV_HEADS, 128), jnp.bfloat16, sharding=there),
            tensor(jnp.bfloat16, batch, KV_HEADS, 128),
            tensor(jnp.bfloat16, batch, HEADS, 128),
            *counts,
            tensor(jnp.int32, batch, 64),
        )
        places = {"in_shardings": (there, *[here] * 6), "out_shardings": (there, None)}
        traced = jax.jit(call, donate_argnums=0, **places).trace(*arguments)
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    size = 2 * arguments[0].size
    operations = read_operations(compiled.as_text(), "")
    large = [x for x in operations if x.result_bytes > size // 16 and not x.is_kernel]
    assert bool(large) != is_heads_first
    assert (compiled.memory_analysis().temp_size_in_bytes < size // 16) == is_heads_first


def test_a_copy_would_be_seen():
    shape = ShapeDtypeStruct((PAGES, KV_HEADS, 16, 128), jnp.bfloat16)
    program = aot.compile_program(lambda x: x.swapaxes(1, 2) * 2, (shape,), GENERATIONS["v5e"])
    assert max(x.result_bytes for x in program.operations) == shape.size * 2


def _loop(table, x):
    """A sort, copies and, in a loop, a gather and a product."""
    order = jnp.argsort(table)
    return lax.fori_loop(0, 7, lambda i, x: jnp.sin(x[order]) @ x + i, x)


@pytest.mark.parametrize("name", ["v5e", "tpu7x"])
def test_what_is_dumped_has_the_operations_of_the_compiled_module(name):
    generation = GENERATIONS[name]
    square = ShapeDtypeStruct((512, 512), jnp.float32)
    arguments = ShapeDtypeStruct((512,), jnp.int32), square
    _, compiled, dumped = aot.compile_and_dump(_loop, arguments, generation)
    found = read_operations(*aot.dumped_module(dumped))
    assert found == read_operations(compiled.as_text(), "")
    assert {"sort", "fusion", "copy-start"} <= {operation.opcode for operation in found}
    assert sum(operation.cycles is not None for operation in found) >= 3
