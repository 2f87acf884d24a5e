"""What is timed, by name: plain numbers only, in the terms of the test suite's problems."""

import dataclasses

import torch

from torch_paged_attn.testing import Layout, Problem

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
e4m3, i8 = torch.float8_e4m3fn, torch.int8


@dataclasses.dataclass(frozen=True)
class Attention:
    """An attention call and what bounds it: "read" of the keys and values, "matmul", or "call"."""

    problem: Problem
    bound: str

    @property
    def name(self) -> str:
        return self.problem.name


@dataclasses.dataclass(frozen=True)
class Backward:
    """The backward of an attention call; with `both`, forward and backward together."""

    problem: Problem
    both: bool = False
    bound: str = "backward"

    @property
    def name(self) -> str:
        return self.problem.name


@dataclasses.dataclass(frozen=True)
class CacheWrite:
    """A `reshape_and_cache` call: tokens written to slots in random order."""

    name: str
    num_tokens: int
    dtype: torch.dtype = bf16
    cache_dtype: torch.dtype = bf16
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    bound: str = "copy"


def llama(name: str, seqs: tuple[tuple[int, int], ...], bound: str, **options) -> Attention:
    """Llama-3-8B's heads: 32 query heads, 8 KV heads, head_dim 128."""
    return Attention(Problem(f"llama3_8b/{name}", seqs, 32, 8, 128, **options), bound)


def decode(batch: int, context: int, suffix: str, **options) -> Attention:
    """One query token a sequence over `context` keys, pages of 16 in random order."""
    seqs = ((1, context - 1),) * batch
    return llama(f"decode_{batch}x{context}/{suffix}", seqs, "read", page_size=16, **options)


def prefill(length: int, suffix: str, **options) -> Attention:
    """One causal prompt, keys and values packed."""
    return llama(
        f"prefill_1x{length}/{suffix}", ((length, 0),), "matmul", lengths="none", **options
    )


def mla(name: str, num_heads: int, queries: int = 1, latent: bool = False) -> Attention:
    """DeepSeek's decode: 8 sequences of 4096 keys of 512 + 64 numbers, whose first are the values.

    With `latent`, the 512 and the 64 lie in caches of their own.
    """
    name = f"deepseek_mla/{name}_8x4096/{num_heads}_heads"
    seqs = ((queries, 4096 - queries),) * 8
    options = dict(dtype=bf16, page_size=64, softmax_scale=192**-0.5)
    if latent:
        problem = Problem(name, seqs, num_heads, 1, 64, 512, latent=True, **options)
    else:
        problem = Problem(name, seqs, num_heads, 1, 576, 512, cache_layout="mla", **options)
    return Attention(problem, "matmul")


def encoder(name: str, batch: int, length: int, head_dim: int) -> Attention:
    """12 heads in float32: MiniLM (head_dim 32), global layers of ModernBERT (64)."""
    seqs = ((length, 0),) * batch
    name = f"{name}/encoder_{batch}x{length}/f32"
    return Attention(Problem(name, seqs, 12, 12, head_dim, lengths="none", causal=False), "matmul")


def training(
    name: str, seqs: tuple[tuple[int, int], ...], both: bool = False, **options
) -> Backward:
    """Causal prompts with a gradient, keys and values packed."""
    name = f"llama3_8b/{'step' if both else 'backward'}_{name}"
    return Backward(Problem(name, seqs, 32, 8, 128, lengths="none", **options), both)


def sparse(length: int, density: float) -> Attention:
    """A causal prompt of which every row of 64 x 64 blocks lists about `density`."""
    name = f"blocksparse_1x{length}/density_{density}"
    layout = Layout(64, 64, "kv", density=density)
    return llama(name, ((length, 0),), "matmul", lengths="none", dtype=bf16, layout=layout)


PROMPTS = ((17, 0), (1000, 0), (333, 0), (64, 0), (2048, 0))
MIXED = ((1, 1000), (1, 3000), (512, 0), (256, 768), (1, 200), (37, 91), (1024, 0), (1, 4095))

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        decode(1, 1024, "bf16", dtype=bf16),
        decode(8, 1024, "bf16", dtype=bf16),
        decode(32, 1024, "bf16", dtype=bf16),
        decode(8, 8192, "bf16", dtype=bf16),
        decode(8, 8192, "bf16_nhd", dtype=bf16, cache_layout="nhd"),
        decode(8, 8192, "f32"),
        decode(8, 8192, "kv_e4m3", dtype=bf16, kv_dtype=e4m3, descale="scalar"),
        decode(8, 8192, "kv_int8", dtype=bf16, kv_dtype=i8, descale="scalar"),
        llama("guess_8x4096x4/bf16", ((4, 4092),) * 8, "read", page_size=16, dtype=bf16),
        mla("decode", 16),
        mla("decode", 128),
        mla("guess_4", 16, queries=4),
        mla("guess_4", 128, queries=4),
        mla("q_latent", 16, latent=True),
        mla("q_latent", 128, latent=True),
        prefill(1024, "bf16", dtype=bf16),
        prefill(4096, "bf16", dtype=bf16),
        prefill(1024, "f32"),
        prefill(4096, "f32"),
        prefill(1024, "f16", dtype=f16),
        prefill(4096, "f16", dtype=f16),
        prefill(1024, "bf16_dropout", dtype=bf16, dropout_p=0.1),
        llama("prefill_ragged/bf16", PROMPTS, "matmul", dtype=bf16, lengths="none"),
        encoder("minilm", 8, 128, 32),
        encoder("modernbert", 8, 128, 64),
        encoder("modernbert", 8, 256, 64),
        encoder("modernbert", 8, 512, 64),
        llama("mixed/bf16", MIXED, "matmul", dtype=bf16, page_size=16),
        training("1x1024/bf16", ((1024, 0),), dtype=bf16),
        training("1x4096/bf16", ((4096, 0),), dtype=bf16),
        training("1x1024/f16", ((1024, 0),), dtype=f16),
        training("1x1024/f32", ((1024, 0),)),
        training("1x4096/f32", ((4096, 0),)),
        training("ragged/bf16", PROMPTS, dtype=bf16),
        training("1x1024/bf16", ((1024, 0),), both=True, dtype=bf16),
        training("ragged/bf16", PROMPTS, both=True, dtype=bf16),
        sparse(4096, 0.5),
        sparse(4096, 0.25),
        sparse(4096, 0.1),
        CacheWrite("reshape_and_cache_4096/bf16", 4096),
        CacheWrite("reshape_and_cache_4096/bf16_to_e4m3", 4096, cache_dtype=e4m3),
        Attention(Problem("tiny/decode_1x16/f32", ((1, 15),), 1, 1, 16, page_size=16), "call"),
    )
}
