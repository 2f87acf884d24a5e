"""Named problems for the schedule emulator: our kernels, and the peers' on the same work.

Tables have values, since they decide what a kernel does; tensors have shapes only.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aot
import jax.numpy as jnp
import numpy as np
from generations import Generation
from jax import ShapeDtypeStruct
from peers import jax_paged_attention, rpa_v3, splash

from torch_paged_attn.backends.tpu.blocksparse import blocksparse
from torch_paged_attn.backends.tpu.config import CHIPS, Config
from torch_paged_attn.backends.tpu.flash_varlen import flash_varlen
from torch_paged_attn.backends.tpu.flash_varlen_backward import flash_varlen_backward
from torch_paged_attn.backends.tpu.reshape_and_cache import reshape_and_cache

# what tests/schedules holds our kernels to
BUDGET = Path(__file__).parent / "budget.json"
BUDGETED = ("bundles", "hbm_bytes", "dmas")

LEAST_SLOTS = 1 << 18  # 1 GiB of Llama-3-8B's keys and values in one layer

# a function and its arguments for one generation
Build = Callable[[Generation], tuple[Callable[..., Any], tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class Problem:
    name: str
    contenders: dict[str, Build]
    # what has to cross HBM whatever the kernel: live keys and values, once
    live_bytes: int
    # the kernels that are counted: those whose names have this in them
    kernels: str = ""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of equal length over a paged bfloat16 cache, pages in random order."""

    sequences: int
    keys: int
    queries: int
    page_size: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries

    @property
    def num_pages(self) -> int:
        """Of a cache that is larger than VMEM, as any is that serves."""
        return max(self.sequences * self.keys, LEAST_SLOTS) // self.page_size

    @property
    def live_bytes(self) -> int:
        return 2 * 2 * self.sequences * self.keys * self.num_kv_heads * self.head_dim

    @property
    def q(self) -> ShapeDtypeStruct:
        return ShapeDtypeStruct((self.tokens, self.num_heads, self.head_dim), jnp.bfloat16)

    @property
    def new_keys(self) -> ShapeDtypeStruct:
        return ShapeDtypeStruct((self.tokens, self.num_kv_heads, self.head_dim), jnp.bfloat16)

    @property
    def cache(self) -> ShapeDtypeStruct:
        page = (self.num_kv_heads, self.page_size, self.head_dim)
        return ShapeDtypeStruct((2, self.num_pages, *page), jnp.bfloat16)

    @property
    def cu_seqlens(self) -> np.ndarray:
        return np.arange(self.sequences + 1, dtype=np.int32) * self.queries

    @property
    def seqused_k(self) -> np.ndarray:
        return np.full(self.sequences, self.keys, np.int32)

    @property
    def block_table(self) -> np.ndarray:
        pages = np.random.default_rng(0).permutation(self.num_pages).astype(np.int32)
        return pages[: self.sequences * self.keys // self.page_size].reshape(self.sequences, -1)

    @property
    def slot_mapping(self) -> np.ndarray:
        """Where the keys of the queries' tokens go: the last ones of each sequence."""
        position = np.arange(self.keys - self.queries, self.keys)
        page = self.block_table[:, position // self.page_size]
        return (page * self.page_size + position % self.page_size).astype(np.int32).reshape(-1)


def config_for(generation: Generation) -> Config:
    """What the kernels choose on this generation."""
    return CHIPS[aot.device_kind(generation)]


def ours(batch: Batch, *, writes: bool = False) -> Build:
    """The op as the adapters call it, cache passed whole; if it `writes`, behind the other one."""

    def build(generation: Generation) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        config = config_for(generation)

        def attend(q: Any, cache: Any, cu_seqlens: Any, seqused_k: Any, block_table: Any) -> Any:
            return flash_varlen(
                q, cache, None, cu_seqlens, None, seqused_k, block_table,
                max_seqlen_q=batch.queries, causal=True, config=config,
            )  # fmt: skip

        def write_and_attend(keys: Any, slots: Any, q: Any, cache: Any, *tables: Any) -> Any:
            return attend(q, reshape_and_cache(keys, keys, cache, slots), *tables)

        tables = (batch.cu_seqlens, batch.seqused_k, batch.block_table)
        if writes:
            written = (batch.new_keys, batch.slot_mapping)
            return write_and_attend, (*written, batch.q, batch.cache, *tables)
        return attend, (batch.q, batch.cache, *tables)

    return build


def attention(name: str, batch: Batch, *, seed: bool = False) -> Problem:
    contenders: dict[str, Build] = {
        "ours": ours(batch),
        "ours, with the write": ours(batch, writes=True),
        "RPA v3": rpa_v3(batch),
    }
    if seed:
        contenders["seed"] = jax_paged_attention(batch)
    return Problem(name, contenders, batch.live_bytes)


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


def measure(build: Build, generation: Generation, names: str = "") -> dict[str, Any]:
    """Counts of the kernels of one contender that have `names` in theirs: together, of each."""
    function, arguments = build(generation)
    kernels = []
    for kernel in aot.compile_kernels(function, arguments, generation):
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
    return total | {"kernels": kernels}


PROBLEMS = [
    attention("decode_b64_kv4096_page16", Batch(64, 4096, 1, 16), seed=True),
    attention("decode_b64_kv4096_page128", Batch(64, 4096, 1, 128), seed=True),
    attention("prefill_b2_2048_page16", Batch(2, 2048, 2048, 16)),
    attention("prefill_b2_2048_page128", Batch(2, 2048, 2048, 128)),
    blocksparse_causal(4096, 8, 128, 512),
    blocksparse_causal(4096, 8, 128, 1024),
    backward_causal(4096, 8, 128, 512),
    backward_causal(4096, 8, 128, 1024),
]
