"""What Pallas' interpreter cannot see, by the compiler's own word: how much a kernel may have of
semaphores and of the scalar core's memory, where copies may begin, which grids there are, and what
the two cores of v4 and v5p do.

A probe asks libtpu for more than it grants, so that it is known to refuse; then our kernels go to
their own limits. A sample of the pairs; all with the profile `thorough`.
"""

import functools
import os

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contenders import config_for
from generations import GENERATIONS
from jax import ShapeDtypeStruct
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.cache_write import MOST_TOKENS, reshape_and_cache
from torch_paged_attn.backends.tpu.functions import blocksparse, flash_varlen
from torch_paged_attn.backends.tpu.kernels.launch import MOST_WORDS
from torch_paged_attn.backends.tpu.pages import packed_shape

HEADS, KV_HEADS, HEAD_DIM, CACHE_PAGES = 32, 8, 128, 4096
SMEM_WORDS = 1 << 18
SEMAPHORES = 1 << 12  # more than any generation has
WIDTHS = {"bf16": jnp.bfloat16, "fp32": jnp.float32, "int8": jnp.int8}


def over(cases, every=3):
    """Each case on some generations, each generation with some cases: one of `every` pairs."""
    pairs = [
        pytest.param(case, generation, id=f"{case}/{name}")
        for i, case in enumerate(cases)
        for j, (name, generation) in enumerate(GENERATIONS.items())
        if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" or (i + j) % every == 0
    ]
    return pytest.mark.parametrize(("case", "generation"), pairs)


def _probe(kernel, *, shape=(64, 128), dtype=jnp.float32, scratch=(), grid=(1,), **params):
    """A kernel of one array in HBM, which it may copy from, to one in VMEM."""

    def call(x, *size):
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=tuple(size) or grid,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
            scratch_shapes=[pltpu.SemaphoreType.DMA, *scratch],
        )
        out = ShapeDtypeStruct((16, 128), dtype)
        compiler_params = pltpu.CompilerParams(**params)
        return pl.pallas_call(
            kernel, out, grid_spec=grid_spec, compiler_params=compiler_params, name="probe"
        )(x)

    return call, (ShapeDtypeStruct(shape, dtype),)


def _copy_from(first, x, out, done, *_):
    copy = pltpu.make_async_copy(x.at[pl.ds(first, 16)], out, done)
    copy.start()
    copy.wait()


def _compile(probe, generation):
    return aot.compile_program(*probe, generation)


@over(["smem", "semaphores", "vmem"])
def test_libtpu_refuses_more_memory_than_there_is(case, generation):
    def kernel(x, out, done, scratch):
        _copy_from(0, x, out, done)
        if case == "vmem":
            scratch[...] = jnp.full(scratch.shape, scratch[0, 0, 0])
        elif case == "smem":
            scratch[0] = scratch[1]

    many = {
        "smem": (pltpu.SMEM((SMEM_WORDS,), jnp.int32), pltpu.SMEM((MOST_WORDS,), jnp.int32)),
        "semaphores": (pltpu.SemaphoreType.DMA((SEMAPHORES,)), pltpu.SemaphoreType.DMA((64,))),
        "vmem": tuple(
            pltpu.VMEM((generation.vmem_bytes * part // 8 // 4096, 8, 128), jnp.float32)
            for part in (9, 7)
        ),
    }[case]
    limit = generation.vmem_bytes
    too_many, some = (_probe(kernel, scratch=[x], vmem_limit_bytes=limit) for x in many)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED|exceed"):
        _compile(too_many, generation)
    assert _compile(some, generation).kernels


# sequences, pages of each, queries of each, tokens of all together
TABLES = {
    "few_long": (120, 2000, 1, 120),
    "many_short": (6000, 24, 1, 6000),
    "chunks": (100, 2400, 512, 8192),
    "8_bits": (2048, 80, 1, 2048),
}


def _attention(generation, *, sequences, pages, queries, tokens, dtype=jnp.bfloat16, page_size=32):
    cache = packed_shape((2, CACHE_PAGES, KV_HEADS, page_size, HEAD_DIM))
    descale = ShapeDtypeStruct((), jnp.float32) if jnp.dtype(dtype).itemsize == 1 else None
    of_q = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16
    arguments = (
        ShapeDtypeStruct((tokens, HEADS, HEAD_DIM), of_q),
        ShapeDtypeStruct(cache, dtype),
        ShapeDtypeStruct((sequences + 1,), jnp.int32),
        ShapeDtypeStruct((sequences,), jnp.int32),
        ShapeDtypeStruct((sequences, pages), jnp.int32),
        descale,
    )

    def call(q, cache, cu_seqlens, lengths, table, descale):
        return flash_varlen(
            q, cache, None, cu_seqlens, None, lengths, table, k_descale=descale,
            v_descale=descale, max_seqlen_q=queries, causal=True, config=config_for(generation),
        )  # fmt: skip

    return call, arguments


@over(TABLES)
def test_tables_compile_up_to_our_limit_and_are_refused_beyond_it(case, generation):
    sequences, pages, queries, tokens = TABLES[case]
    dtype = jnp.int8 if case == "8_bits" else jnp.bfloat16
    size = {"sequences": sequences, "queries": queries, "tokens": tokens, "dtype": dtype}
    program = _compile(_attention(generation, pages=pages, **size), generation)
    assert program.kernels
    call, arguments = _attention(generation, pages=2 * pages, **size)
    with pytest.raises(NotImplementedError, match=r"tpu backend: tables of \d+ numbers"):
        jax.eval_shape(call, *arguments)


@over(["layout"])
def test_a_layout_of_too_many_blocks_is_refused(case, generation):
    tokens, block = 1 << 17, 64
    rows = tokens // block
    q = ShapeDtypeStruct((tokens, HEADS, HEAD_DIM), jnp.bfloat16)
    k = ShapeDtypeStruct((tokens, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    layout = (
        ShapeDtypeStruct((HEADS, rows + 1), jnp.int32),
        ShapeDtypeStruct((HEADS, rows * rows), jnp.int32),
    )
    call = functools.partial(
        blocksparse, max_seqlen_q=tokens, causal=True, config=config_for(generation)
    )
    with pytest.raises(NotImplementedError, match=r"tpu backend: tables of \d+ numbers"):
        jax.eval_shape(call, q, k, k, *layout, ShapeDtypeStruct((2,), jnp.int32))


@over([MOST_TOKENS, 2 * MOST_TOKENS + 5])
def test_writes_of_any_number_of_tokens_compile(case, generation):
    key = ShapeDtypeStruct((case, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    cache = ShapeDtypeStruct((2, CACHE_PAGES, KV_HEADS, 32, HEAD_DIM), jnp.bfloat16)
    slots = ShapeDtypeStruct((case,), jnp.int32)
    program = _compile((reshape_and_cache, (key, key, cache, slots)), generation)
    assert len(program.kernels) == -(-case // MOST_TOKENS)


@over(["of_a_number", "of_a_variable"])
def test_libtpu_refuses_copies_that_begin_within_a_tile(case, generation):
    def kernel(x, out, done):
        first = 3 if case == "of_a_number" else pl.program_id(0) + 3
        _copy_from(first, x, out, done)

    def aligned(x, out, done):
        _copy_from(pl.multiple_of(pl.program_id(0) * 16, 16), x, out, done)

    with pytest.raises(Exception, match=r"(?i)align|divisible|tiling|not implemented"):
        _compile(_probe(kernel, dtype=jnp.bfloat16), generation)
    assert _compile(_probe(aligned, dtype=jnp.bfloat16), generation).kernels


@over(
    [f"{name}_{size}" for name in WIDTHS for size in (1, 8, 16, 24, 32, 40, 48, 96, 272)], every=13
)
def test_pages_of_every_size_compile(case, generation):
    """Whole tiles or not: what is no whole number of them must not reach a copy."""
    name, _, size = case.partition("_")
    size = {"page_size": int(size), "dtype": WIDTHS[name]}
    call, arguments = _attention(generation, sequences=4, pages=16, queries=1, tokens=4, **size)
    assert _compile((call, arguments), generation).kernels


def test_no_grid_hangs_on_a_value():
    """libtpu takes such grids, the interpreter does not know them: ours are numbers."""
    generation = GENERATIONS["v6e"]

    def count(x, out, done):
        _copy_from(0, x, out, done)

    call, (x,) = _probe(count)
    assert _compile((call, (x, ShapeDtypeStruct((), jnp.int32))), generation).kernels
    dynamic = jax.make_jaxpr(call)(x, ShapeDtypeStruct((), jnp.int32))
    assert _dynamic_grids(dynamic) == [1]
    mixed = _attention(generation, sequences=4, pages=64, queries=256, tokens=1024)
    assert _dynamic_grids(jax.make_jaxpr(mixed[0])(*mixed[1])) == [0, 0]


def _dynamic_grids(closed):
    """Of each kernel of a jaxpr, how many dimensions of its grid are values."""
    found = []
    for equation in closed.jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            found.append(equation.params["grid_mapping"].num_dynamic_grid_bounds)
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                found += _dynamic_grids(inner)
    return found


@pytest.mark.parametrize("name", ["v4", "v5p", "v6e"])
def test_two_cores_share_the_sequences(name):
    """Each page is read by one core, and both have as much to do."""
    generation = GENERATIONS[name]
    lengths = np.full(16, 2048, np.int32)
    pages = 2048 // 32
    table = np.arange(16 * pages, dtype=np.int32).reshape(16, pages)
    call, arguments = _attention(generation, sequences=16, pages=pages, queries=1, tokens=16)
    cu_seqlens = np.arange(17, dtype=np.int32)
    arguments = (*arguments[:2], cu_seqlens, lengths, table, None)
    [kernel] = _compile((call, arguments), generation).kernels
    counts = kernel.counts(generation)
    # libtpu compiles for one core of a v4 that is not there, although it has two
    assert counts.cores == (2 if generation.name == "v5p" else 1)
    live = 2 * 16 * 2048 * KV_HEADS * HEAD_DIM * 2
    assert live <= counts.dma_bytes["hbm_to_vmem"] < 1.01 * live
