"""Named problems for the schedule emulator: our kernels, and the peers' on the same work.

Tables have values, since they decide what a kernel does; tensors have shapes only.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
from batches import SERVED, Batch
from generations import Generation
from jax import ShapeDtypeStruct
from peers import Missing, jax_paged_attention, mla, rpa_v3, sparse_mla, splash

from torch_paged_attn.backends.tpu.cache_write import reshape_and_cache
from torch_paged_attn.backends.tpu.functions import blocksparse, flash_varlen, flash_varlen_backward
from torch_paged_attn.backends.tpu.pages import packed_shape
from torch_paged_attn.backends.tpu.tile_sizes import CHIPS, Config

# what tests/schedules holds our kernels to
BUDGET = Path(__file__).parent / "budget.json"
BUDGETED = ("bundles", "hbm_bytes", "dmas", "around_cycles")

# a function and its arguments for one generation
Build = Callable[[Generation], tuple[Callable[..., Any], tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class Problem:
    name: str
    # several builds are one contender that is tried with several sizes, of which the best counts
    contenders: dict[str, Build | tuple[Build, ...]]
    # what has to cross HBM whatever the kernel: live keys and values, once
    live_bytes: int
    # the kernels that are counted: those whose names have this in them
    kernels: str = ""


def config_for(generation: Generation) -> Config:
    """What the kernels choose on this generation."""
    return CHIPS[aot.device_kind(generation)]


def ours(batch: Batch, *, writes: bool = False) -> Build:
    """The op as the adapters call it, cache passed whole; if it `writes`, behind the other one,
    which is given the cache's memory.
    """

    def build(generation: Generation) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        config = config_for(generation)

        def attend(
            q: Any, cache: Any, cu_seqlens: Any, seqused_k: Any, block_table: Any, sinks: Any
        ) -> Any:
            return flash_varlen(
                q, cache, None, cu_seqlens, None, seqused_k, block_table, sinks=sinks,
                max_seqlen_q=max(batch.queries), window_size_left=batch.window, causal=True,
                config=config,
            )  # fmt: skip

        def write_and_attend(cache: Any, keys: Any, slots: Any, q: Any, *tables: Any) -> Any:
            cache = reshape_and_cache(keys, keys, cache, slots)
            return cache, attend(q, cache, *tables)

        tables = (batch.cu_seqlens, batch.seqused_k, batch.block_table, batch.sinks)
        if writes:
            function = jax.jit(write_and_attend, donate_argnums=0)
            return function, (batch.cache, batch.new_keys, batch.slot_mapping, batch.q, *tables)
        return attend, (batch.q, batch.cache, *tables)

    return build


def attention(name: str, batch: Batch, *, seed: bool = False) -> Problem:
    contenders: dict[str, Build | tuple[Build, ...]] = {
        "ours": ours(batch),
        "ours, with the write": ours(batch, writes=True),
        "RPA v3": rpa_v3(batch),
    }
    if seed:
        contenders["seed"] = jax_paged_attention(batch)
    return Problem(name, contenders, batch.live_bytes)


def alone(
    name: str, batch: Batch, tensors: dict[str, Any] | None = None, **options: Any
) -> Problem:
    """Serving without a peer beside it, with more arguments of the op."""
    options = {"causal": True} | options

    def build(generation: Generation) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        config = config_for(generation)

        def call(q: Any, cache: Any, given: dict[str, Any], *tables: Any) -> Any:
            cu_seqlens, seqused_k, block_table = tables
            return flash_varlen(
                q, cache, None, cu_seqlens, None, seqused_k, block_table,
                max_seqlen_q=max(batch.queries), config=config, **given, **options,
            )  # fmt: skip

        tables = batch.cu_seqlens, batch.seqused_k, batch.block_table
        return call, (batch.q, batch.cache, tensors or {}, *tables)

    return Problem(name, {"ours": build}, batch.live_bytes)


def mla_decode(name: str, batch: Batch, width_v: int) -> Problem:
    """Latent attention, absorbed: one KV head, of whose keys the first `width_v` numbers are the
    values. The cache has rows of whole lanes.
    """

    page = 1, batch.page_size
    k_shape = packed_shape((batch.num_pages, *page, batch.head_dim))

    def ours_of(width_q: int) -> Build:
        def build(generation: Generation) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            config = config_for(generation)

            def call(q: Any, k: Any, v: Any, *tables: Any) -> Any:
                cu_seqlens, seqused_k, block_table = tables
                return flash_varlen(
                    q, k, v, cu_seqlens, None, seqused_k, block_table, max_seqlen_q=1, causal=True,
                    softmax_scale=batch.head_dim**-0.5, config=config,
                )  # fmt: skip

            shapes = (batch.tokens, batch.num_heads, width_q), k_shape, (0, *page, width_v)
            tensors = (ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes)
            return call, (*tensors, batch.cu_seqlens, batch.seqused_k, batch.block_table)

        return build

    contenders: dict[str, Build | tuple[Build, ...]] = {
        "ours": ours_of(batch.head_dim),
        # queries that end in zeros, as wide as the cache's rows
        "ours, queries of whole lanes": ours_of(k_shape[-1]),
        "MLA": mla(batch, width_v=width_v),
    }
    return Problem(name, contenders, 2 * sum(batch.keys) * batch.head_dim)


def by_token(name: str, batch: Batch) -> Problem:
    """A cache of 8 bits with a scale for each token and head."""
    scales = batch.scales_by_token
    scale_bytes = 2 * 4 * sum(batch.keys) * batch.num_kv_heads
    problem = alone(name, batch, {"k_descale": scales, "v_descale": scales})
    return dataclasses.replace(problem, live_bytes=problem.live_bytes + scale_bytes)


def selected_latents(name: str, unit: int) -> Problem:
    """64 tokens with 128 heads, each of which attends 1,024 latents of 512 numbers that its list
    names, in units of `unit` keys: a sequence for each token, as `selected_attention` makes them.
    """
    batch = Batch.equal(
        64, 1024, 1, unit, num_heads=128, num_kv_heads=1, head_dim=512, has_sinks=True
    )

    def build(generation: Generation) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        config = config_for(generation)

        def call(q: Any, k: Any, v: Any, sinks: Any, *tables: Any) -> Any:
            cu_seqlens, seqused_k, block_table = tables
            return flash_varlen(
                q, k, v, cu_seqlens, None, seqused_k, block_table, sinks=sinks, max_seqlen_q=1,
                config=config,
            )  # fmt: skip

        page = 1, unit, batch.head_dim
        k, v = (ShapeDtypeStruct((n, *page), jnp.bfloat16) for n in (batch.num_pages, 0))
        tables = batch.cu_seqlens, batch.seqused_k, batch.block_table
        return call, (batch.q, k, v, batch.sinks, *tables)

    contenders: dict[str, Build | tuple[Build, ...]] = {"ours": build}
    if unit == 1:
        contenders["sparse_mla"] = sparse_mla(batch, page_size=64)
    return Problem(name, contenders, 2 * sum(batch.keys) * batch.head_dim)


def blocksparse_causal(tokens: int, num_heads: int, head_dim: int, block: int) -> Problem:
    """All blocks up to the diagonal, one layout for all heads; packed keys, as splash has them."""
    num_blocks = tokens // block
    crow = np.cumsum(np.arange(num_blocks + 1), dtype=np.int32)
    col = np.concatenate([np.arange(i + 1, dtype=np.int32) for i in range(num_blocks)])

    def build(generation: Generation) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        config = config_for(generation)

        def call(qkv: Any, cu_seqlens: Any, crow: Any, col: Any) -> Any:
            return blocksparse(
                *qkv, crow, col, cu_seqlens, max_seqlen_q=tokens, q_block_size=block,
                k_block_size=block, causal=True, config=config,
            )  # fmt: skip

        shape = ShapeDtypeStruct((tokens, num_heads, head_dim), jnp.bfloat16)
        cu_seqlens = np.array([0, tokens], np.int32)
        return call, ((shape,) * 3, cu_seqlens, crow[None], col[None])

    contenders = {"ours": build, "splash": splash(tokens, num_heads, head_dim, block)}
    name = f"blocksparse_causal_{tokens}_block{block}"
    return Problem(name, contenders, 2 * 2 * tokens * num_heads * head_dim)


def with_bias(name: str, batch: Batch, heads: int = 1) -> Problem:
    """A bias of one head or of all, bfloat16: no peer takes one."""
    bias = ShapeDtypeStruct((heads, batch.tokens, max(batch.keys)), jnp.bfloat16)
    return alone(name, batch, {"attn_bias": bias})


def with_dropout(name: str, batch: Batch) -> Problem:
    """A tenth of the probabilities is dropped."""
    return alone(name, batch, {"rng_state": np.array([1, 0, 2], np.uint32)}, dropout_p=0.1)


def with_layout(name: str, batch: Batch, block: int, heads: int = 1) -> Problem:
    """Serving with a block-sparse layout of all heads, or one of each: the causal one."""
    num_blocks = max(batch.keys) // block
    rows = [np.arange(row + 1, dtype=np.int32) for row in range(num_blocks)]
    crow = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    crow, col = (np.tile(x, (heads, 1)) for x in (crow, np.concatenate(rows)))

    def build(generation: Generation) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        config = config_for(generation)

        def call(q: Any, cache: Any, crow: Any, col: Any, *tables: Any) -> Any:
            cu_seqlens, seqused_k, block_table = tables
            return blocksparse(
                q, cache, None, crow, col, cu_seqlens, None, seqused_k, block_table,
                q_block_size=block, k_block_size=block, max_seqlen_q=max(batch.queries),
                causal=True, config=config,
            )  # fmt: skip

        tables = batch.cu_seqlens, batch.seqused_k, batch.block_table
        return call, (batch.q, batch.cache, crow, col, *tables)

    return Problem(name, {"ours": build}, batch.live_bytes)


def backward_causal(tokens: int, num_heads: int, head_dim: int, block: int) -> Problem:
    """Gradients of q, k and v, packed: blocks of `block` keys, of which ours are computed on in
    steps of 512 as always, and splash's tiles of as many queries.
    """

    def build(generation: Generation) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        config = dataclasses.replace(config_for(generation), block_k=block)

        def call(qkv: Any, dout: Any, out: Any, lse: Any, cu_seqlens: Any) -> Any:
            return flash_varlen_backward(
                dout, None, *qkv, out, lse, cu_seqlens, max_seqlen_q=tokens, causal=True,
                config=config,
            )  # fmt: skip

        shape = ShapeDtypeStruct((tokens, num_heads, head_dim), jnp.bfloat16)
        lse = ShapeDtypeStruct((num_heads, tokens), jnp.float32)
        return call, ((shape,) * 3, shape, shape, lse, np.array([0, tokens], np.int32))

    peer = splash(tokens, num_heads, head_dim, block, backward=True)
    name = f"backward_causal_{tokens}_block{block}"
    # in: q, k, v, dout, out; out: dq, dk, dv
    live_bytes = 8 * 2 * tokens * num_heads * head_dim
    return Problem(name, {"ours": build, "splash": peer}, live_bytes, kernels="_d")


def measure_best(
    builds: Build | tuple[Build, ...], generation: Generation, names: str = ""
) -> dict[str, Any]:
    """`measure` of the build whose program takes the fewest cycles, of those that fit the chip."""
    found: list[dict[str, Any]] = []
    refused: Exception | None = None
    for build in builds if isinstance(builds, tuple) else (builds,):
        try:
            found.append(measure(build, generation, names))
        except (Missing, jax.errors.JaxRuntimeError) as error:
            refused = refused or error
    if not found and refused is not None:
        raise refused
    return min(found, key=lambda counts: counts["program_cycles"])


def measure(build: Build, generation: Generation, names: str = "") -> dict[str, Any]:
    """Counts of one contender: of its kernels that have `names` in theirs, together and of each,
    and what XLA estimates for everything around the kernels.
    """
    function, arguments = build(generation)
    program = aot.compile_program(function, arguments, generation)
    kernels = []
    for kernel in program.kernels:
        if names not in kernel.name:
            continue
        counts = kernel.counts(generation)
        kernels.append(
            {
                "name": kernel.name,
                "vmem_bytes": kernel.vmem_bytes,
                "bundles": counts.bundles,
                "issued": counts.issued,
                "dmas": counts.dmas.total(),
                "hbm_bytes": counts.hbm_bytes,
                "dma_bytes": dict(counts.dma_bytes),
                "units": dict(counts.units),
                "cores": counts.cores,
                "microseconds": round(counts.microseconds(generation), 2),
                "hbm_microseconds": round(counts.hbm_microseconds(generation), 2),
            }
        )
    summed = ("bundles", "issued", "dmas", "hbm_bytes", "microseconds", "hbm_microseconds")
    total: dict[str, Any] = {key: sum(kernel[key] for kernel in kernels) for key in summed}
    total["vmem_bytes"] = max(kernel["vmem_bytes"] for kernel in kernels)
    around = [operation for operation in program.operations if not operation.is_kernel]
    total |= {
        "operations": len(around),
        "unestimated": sum(operation.cycles is None for operation in around),
        "around_cycles": sum(operation.cycles or 0 for operation in around),
        "temporary_bytes": program.temporary_bytes,
    }
    total["program_cycles"] = total["bundles"] + total["around_cycles"]
    return total | {"kernels": kernels}


PROBLEMS = [
    *(attention(name, batch, seed="kv4096_page" in name) for name, batch in SERVED.items()),
    mla_decode(
        "mla_decode_b16_kv4096_page16",
        Batch.equal(16, 4096, 1, 16, num_heads=128, num_kv_heads=1, head_dim=576),
        512,
    ),
    with_bias("bias_mixed_63_and_512_page16", SERVED["mixed_63_and_512_page16"]),
    with_bias("bias_prefill_b2_2048_page16", SERVED["prefill_b2_2048_page16"]),
    with_bias("bias_of_heads_chunk_512_kv2048_page16", Batch((2048,), (512,), 16), heads=32),
    with_dropout("dropout_mixed_63_and_512_page16", SERVED["mixed_63_and_512_page16"]),
    with_layout("layout_mixed_63_and_512_block64", SERVED["mixed_63_and_512_page16"], 64),
    with_layout("layout_prefill_b2_2048_block128", SERVED["prefill_b2_2048_page16"], 128),
    with_layout("layouts_mixed_63_and_512_block64", SERVED["mixed_63_and_512_page16"], 64, 32),
    with_layout("layouts_chunk_512_kv2048_block64", Batch((2048,), (512,), 16), 64, 32),
    alone("speculative_b64_of4_kv4096_page16", Batch.equal(64, 4096, 4, 16)),
    alone(
        "decode_of_4_heads_b64_kv4096_page16",
        Batch.equal(64, 4096, 1, 16, num_heads=4, num_kv_heads=1),
    ),
    by_token("int8_by_token_b64_kv4096_page32", Batch.equal(64, 4096, 1, 32, stored=jnp.int8)),
    by_token(
        "e4m3_by_token_b64_kv4096_page32", Batch.equal(64, 4096, 1, 32, stored=jnp.float8_e4m3fn)
    ),
    # lists of whole pages: each token is a sequence of one query; by KV heads, each of its heads
    alone("selected_b64_16_pages_of_64", Batch.equal(64, 1024, 1, 64), causal=False),
    alone(
        "selected_by_head_b64_16_pages_of_64",
        Batch.equal(512, 1024, 1, 64, num_heads=4, num_kv_heads=1),
        causal=False,
    ),
    selected_latents("selected_latents_b64_16_pages_of_64", 64),
    selected_latents("selected_latents_b64_1024_tokens", 1),
    blocksparse_causal(4096, 8, 128, 512),
    blocksparse_causal(4096, 8, 128, 1024),
    backward_causal(4096, 8, 128, 512),
    backward_causal(4096, 8, 128, 1024),
]
