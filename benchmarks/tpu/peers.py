"""Other people's kernels on our problems: they live in JAX or in .peer/, nothing of them here.

RPA v3 and the MLA kernel (`get_peers.sh`) write the new keys into the cache in the same kernel and
want a cache of their own layout. tokamax's sparse_mla gathers the rows of a list on the SparseCore,
whose code nothing here counts, and then attends to them by a kernel. The seed design is the kernel
it came from, JAX's `paged_attention`.
"""

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import aot
import jax
import jax.numpy as jnp
import numpy as np
from generations import Generation
from jax import ShapeDtypeStruct
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

PEER = Path(__file__).parents[2] / ".peer"
MIB = 2**20

# (fetched queries, fetched keys, computed queries, computed keys) that RPA v3 is tried with beside
# what it chooses by itself, which is the same on the other generations
RPA_CHUNK_BLOCKS = {"tpu7x": (256, 1024, 128, 512)}

# keys of a block that the MLA kernel is tried with
MLA_BLOCKS = (1024, 2048, 4096)

# tokens of a step that sparse_mla is tried with
SPARSE_MLA_TOKENS = (4, 8, 16)


class Missing(Exception):
    """A peer that is not installed, or does not support this."""


def rpa_v3(batch: Any) -> tuple[Callable[[Generation], Any], ...]:
    """With the blocks that it chooses, and where there are queries in chunks with others."""
    return (
        _rpa_v3(batch, {}),
        *([_rpa_v3(batch, RPA_CHUNK_BLOCKS)] if max(batch.queries) > 1 else []),
    )


def _rpa_v3(batch: Any, blocks: dict[str, tuple[int, ...]]) -> Callable[[Generation], Any]:
    def build(generation: Generation) -> Any:
        _find_tpu_inference(generation)
        from tpu_inference.kernels.ragged_paged_attention.v3 import kernel, kernel_hd64

        is_narrow = batch.head_dim == 64
        module = kernel_hd64 if is_narrow else kernel
        options: dict[str, Any] = {"sm_scale": batch.head_dim**-0.5}
        if blocks:
            if generation.name not in blocks:
                raise Missing("chooses these blocks by itself")
            options["m_block_sizes"] = blocks[generation.name]
        if batch.window >= 0:
            options["sliding_window"] = batch.window + 1

        def call(cache: Any, q: Any, keys: Any, *tables: Any) -> Any:
            with _devices_are(generation):
                attend = kernel.ragged_paged_attention
                if is_narrow:
                    attend = kernel_hd64.ragged_paged_attention_hd64
                return attend(q, keys, keys, cache, *tables, **options)

        cache = module.get_kv_cache_shape(
            batch.num_pages, batch.page_size, batch.num_kv_heads, batch.head_dim, jnp.bfloat16
        )
        decodes = sum(queries == 1 for queries in batch.queries)
        # sequences that only decode, those and plain prefills, all
        distribution = np.array([decodes, decodes, batch.sequences], np.int32)
        return jax.jit(call, donate_argnums=0), (
            ShapeDtypeStruct(cache, jnp.bfloat16), batch.q, batch.new_keys, batch.seqused_k,
            batch.block_table.reshape(-1), batch.cu_seqlens, distribution,
            *([batch.sinks] if is_narrow else []),
        )  # fmt: skip

    return build


def _find_tpu_inference(generation: Generation) -> None:
    """Make its kernels importable, without the rest of the package."""
    if not (PEER / "tpu_inference" / "kernels" / "mla" / "v2").exists():
        raise Missing("benchmarks/tpu/get_peers.sh brings it")
    if generation.name == "v4":
        raise Missing("refuses TPU v4")
    if str(PEER) not in sys.path:
        sys.path.insert(0, str(PEER))
    # what its kernels want of the rest of the package
    rest = types.SimpleNamespace(
        init_logger=lambda _name: mock.MagicMock(),
        get_device_name=lambda _number=None: aot.device_kind(generation),
        MLA_XPOSE_N_TILE_SIZE=128,
    )
    for module_name in ("logger", "utils", "envs"):
        sys.modules[f"tpu_inference.{module_name}"] = rest  # type: ignore[assignment]


def mla(batch: Any, *, width_v: int) -> tuple[Callable[[Generation], Any], ...]:
    """Latent attention, absorbed: the first `width_v` numbers of a key are its value. Tried
    with blocks of several sizes.
    """
    return tuple(_mla(batch, width_v, block_keys) for block_keys in MLA_BLOCKS)


def _mla(batch: Any, width_v: int, block_keys: int) -> Callable[[Generation], Any]:

    def build(generation: Generation) -> Any:
        _find_tpu_inference(generation)
        from tpu_inference.kernels.mla.v2 import kernel

        def call(cache: Any, *tensors: Any) -> Any:
            nope, rope, new, new_rope, *tables = tensors
            with _devices_are(generation):
                return kernel.mla_ragged_paged_attention(
                    nope, rope, new, new_rope, cache, *tables, sm_scale=batch.head_dim**-0.5,
                    num_kv_pages_per_block=block_keys // batch.page_size, num_queries_per_block=1,
                    vmem_limit_bytes=generation.vmem_bytes * 3 // 4,
                )  # fmt: skip

        # as its own function has it, with the rope's numbers in lanes of their own
        cache = (batch.num_pages, batch.page_size // 2, 2, width_v + 128)
        heads, tokens, rope = batch.num_heads, batch.tokens, batch.head_dim - width_v
        shapes = (heads, tokens, width_v), (tokens, heads, rope), (tokens, width_v), (tokens, rope)
        counts = np.array([batch.sequences] * 3, np.int32)
        return jax.jit(call, donate_argnums=0), (
            ShapeDtypeStruct(cache, jnp.bfloat16),
            *(ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes),
            batch.seqused_k, batch.block_table.reshape(-1), batch.cu_seqlens, counts,
        )  # fmt: skip

    return build


def sparse_mla(batch: Any, page_size: int) -> tuple[Callable[[Generation], Any], ...]:
    """Each token attends as many latents as `batch` has keys, from a cache of DeepSeek-V4's format:
    448 numbers of e4m3 with 64 scales, and 64 of bfloat16. Tried with steps of several sizes.
    """
    return tuple(_sparse_mla(batch, page_size, tokens) for tokens in SPARSE_MLA_TOKENS)


def _sparse_mla(batch: Any, page_size: int, step: int) -> Callable[[Generation], Any]:

    def build(generation: Generation) -> Any:
        if not (PEER / "tokamax").exists():
            raise Missing("benchmarks/tpu/get_peers.sh brings it")
        if generation.name in ("v4", "v5e"):
            raise Missing("gathers on a SparseCore of v6e or TPU7x")
        if str(PEER) not in sys.path:
            sys.path.insert(0, str(PEER))
        from tokamax._src.ops.sparse_mla import pallas_mosaic_tpu_kernel as kernel

        def call(*tensors: Any) -> Any:
            with _devices_are(generation):
                return kernel.sparse_ragged_paged_attention(
                    *tensors, sm_scale=batch.head_dim**-0.5, attention_kernel_batch_size=step,
                    gather_and_attention_chunk_size=batch.tokens,
                    vmem_limit_bytes=generation.vmem_bytes * 3 // 4,
                )  # fmt: skip

        selected, tokens, heads = max(batch.keys), batch.tokens, batch.num_heads
        of_sequence = 2 * selected // page_size
        random = np.random.default_rng(0)
        lists = [random.permutation(of_sequence * page_size)[:selected] for _ in range(tokens)]
        pages = random.permutation(batch.num_pages * batch.page_size // page_size)
        counts = np.array([tokens] * 3, np.int32)
        nope, rope = (
            ShapeDtypeStruct((len(pages), rows, 128), jnp.int32)
            for rows in (page_size, page_size // 4)
        )
        # of the window that it is merged with: sums, their divisors and maxima
        of_row = ShapeDtypeStruct((tokens, heads), jnp.float32)
        # the result takes the queries' memory
        return jax.jit(call, donate_argnums=0), (
            batch.q, nope, rope, np.stack(lists).astype(np.int32),
            pages[: tokens * of_sequence].astype(np.int32), batch.cu_seqlens, counts, batch.sinks,
            batch.q, of_row, of_row,
        )  # fmt: skip

    return build


@contextlib.contextmanager
def _devices_are(generation: Generation) -> Iterator[None]:
    """RPA v3 asks `jax.devices()` what it is traced for."""
    device = types.SimpleNamespace(device_kind=aot.device_kind(generation), platform="tpu")
    # where the kernel for heads of 64 looks for it
    moved = mock.patch.object(pltpu, "reciprocal", pl.reciprocal, create=True)
    with mock.patch.object(jax, "devices", lambda *_: [device]), moved:
        yield


def jax_paged_attention(batch: Any) -> Callable[[Generation], Any]:
    """Decode as the seed has it: one DMA for each page, head, and keys or values."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    def build(_generation: Generation) -> Any:
        def call(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> Any:
            pages = max(1, 512 // batch.page_size)
            return paged_attention(q, k, v, lengths, table, pages_per_compute_block=pages)

        pages = (batch.num_kv_heads, batch.num_pages, batch.page_size, batch.head_dim)
        cache = ShapeDtypeStruct(pages, jnp.bfloat16)
        return call, (batch.q, cache, cache, batch.seqused_k, batch.block_table)

    return build


def splash(
    tokens: int, num_heads: int, head_dim: int, block: int, *, backward: bool = False
) -> Callable[[Generation], Any]:
    """JAX's block-sparse attention on a causal mask, whole blocks of `block` by `block`; if
    `backward`, the gradients of q, k and v, forward included.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
        splash_attention_mask_info,
    )

    def build(_generation: Generation) -> Any:
        mask = splash_attention_mask.CausalMask((tokens, tokens))
        names = ["block_q", "block_kv", "block_kv_compute"]
        if backward:
            names += ["block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"]
            names += ["block_q_dq", "block_kv_dq"]
        sizes = splash_attention_kernel.BlockSizes(**dict.fromkeys(names, block))
        # the emulator reads tables of 32 bits; splash would shrink its own to 8
        with mock.patch.object(
            splash_attention_mask_info, "_downcast_to_small_type", lambda table: table
        ):
            kernel = splash_attention_kernel.make_splash_mha(
                splash_attention_mask.MultiHeadMask([mask] * num_heads),
                block_sizes=sizes, head_shards=1, q_seq_shards=1,
            )  # fmt: skip
        qkv = ShapeDtypeStruct((num_heads, tokens, head_dim), jnp.bfloat16)
        if backward:
            return lambda q, k, v, dout: jax.vjp(kernel, q, k, v)[1](dout), (qkv,) * 4
        return lambda q, k, v: kernel(q, k, v), (qkv, qkv, qkv)

    return build
