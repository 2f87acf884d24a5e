"""Problems by name: they feed tests, benchmarks and tuning. Plain numbers only, no tensors."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Layout:
    """A random block-sparse layout with about `density` of its blocks listed."""

    q_block_size: int = 64
    k_block_size: int = 64
    heads: str = "one"  # "one", "kv" or "all": how many layouts a sequence has
    batched: bool = False
    density: float = 0.5


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention call. `seqs`: (query_len, context_len), Lq and Lk - Lq, of each sequence."""

    name: str
    seqs: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    out_scale: bool = False
    page_size: int | None = None  # None: packed keys and values
    cache_layout: str = "hnd"  # "nhd", "interleaved", "packed_last", "mla"
    spare_pages: int = 2
    page_seed: int = 0  # permutes the pages
    lengths: str = "seqused_k"  # or "cu_seqlens_k"; packed "none": keys follow cu_seqlens_q
    padding_rows: int = 0
    fused_qkv: bool = False
    causal: bool = True
    window_size_left: int = -1
    window_size_right: int = -1
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: str = ""  # "heads" or "batch"
    bias: str = ""  # "float" or "bool"
    bias_heads: str = "one"  # or "all"
    sinks: bool = False
    descale: str = ""  # "scalar", "heads" or "batch"
    dropout_p: float = 0.0
    dropout_base: tuple[int, int, int] | None = None  # head, row, column
    deterministic: bool = True
    layout: Layout | None = None
    latent: bool = False
    v_dtype: torch.dtype | None = None  # beside q_latent: of v alone
    tail: bool = False
    k_ranges: str = ""  # packed: "apart" or "shared"
    q_positions: tuple[int, ...] | None = None
    batch_invariant: bool = False
    key_ranks: int = 1
    key_rank: int = 0
    key_interleave: int = 1
    seed: int = 0

    @property
    def op(self) -> str:
        """The operator this problem calls."""
        return "flash_varlen" if self.layout is None else "blocksparse"

    @property
    def query_lens(self) -> list[int]:
        """Lq of each sequence."""
        return [query_len for query_len, _ in self.seqs]

    @property
    def key_lens(self) -> list[int]:
        """Lk of each sequence."""
        return [query_len + context_len for query_len, context_len in self.seqs]

    @property
    def optional(self) -> frozenset[str]:
        """The arguments that it gives of those that a backend may lack."""
        uses = {
            "q_latent": self.latent,
            "tail_mask": self.tail,
            "k_start": bool(self.k_ranges),
            "q_position": self.q_positions is not None,
            "batch_invariant": self.batch_invariant,
            "key_ranks": self.key_ranks > 1,
            "key_rank": self.key_rank > 0,
            "key_interleave": self.key_interleave > 1,
            "rng_state[2:]": self.dropout_base is not None,
        }
        return frozenset(name for name, is_used in uses.items() if is_used)


bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
e4m3, e5m2, i8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8

# (query_len, context_len): decode, prefill from empty, chunked prefill, empty sequence, speculation
MIXED = ((1, 300), (130, 0), (37, 91), (0, 17), (5, 64), (1, 0))
RAGGED = ((3, 0), (0, 0), (70, 0), (1, 0), (129, 0))

PROBLEMS = {
    p.name: p
    for p in (
        Problem("minilm/packed/f32", RAGGED, 12, 12, 32, causal=False, lengths="none"),
        Problem("llama3_8b/prefill_ragged/bf16", RAGGED, 8, 2, 128, dtype=bf16, fused_qkv=True),
        Problem(
            "llama3_8b/decode_b5/bf16",
            ((1, 31), (1, 0), (1, 500), (1, 63), (1, 1200)),
            8,
            2,
            128,
            dtype=bf16,
            page_size=16,
            cache_layout="nhd",
            padding_rows=3,
        ),
        Problem("llama3_8b/mixed/f32", MIXED, 8, 2, 128, page_size=16, padding_rows=2),
        Problem("llama3_8b/mixed/bf16", MIXED, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("llama3_8b/mixed/f16", MIXED, 8, 2, 128, dtype=f16, page_size=32),
        Problem(
            "llama3_8b/mixed/kv_e4m3",
            MIXED,
            8,
            2,
            128,
            dtype=bf16,
            kv_dtype=e4m3,
            page_size=16,
            descale="heads",
        ),
        Problem(
            "llama3_8b/mixed/kv_e5m2",
            MIXED,
            8,
            2,
            128,
            dtype=f16,
            kv_dtype=e5m2,
            page_size=16,
            descale="batch",
        ),
        Problem(
            "llama3_8b/mixed/kv_int8", MIXED, 8, 2, 128, kv_dtype=i8, page_size=16, descale="scalar"
        ),
        Problem(
            "llama3_8b/prefill/e4m3", RAGGED, 8, 2, 128, dtype=e4m3, out_dtype=bf16, descale="batch"
        ),
        Problem(
            "llama3_8b/prefill/out_e4m3",
            RAGGED,
            8,
            2,
            128,
            dtype=bf16,
            out_dtype=e4m3,
            out_scale=True,
        ),
        Problem(
            "llama3_8b/speculative/bf16",
            ((4, 40), (16, 257), (2, 0)),
            8,
            2,
            128,
            dtype=bf16,
            page_size=16,
            bias="bool",
            causal=False,
        ),
        Problem(
            "llama3_70b_tp8/decode/bf16", ((1, 2100), (1, 77)), 8, 1, 128, dtype=bf16, page_size=16
        ),
        # sums over many keys: one chain of float32 additions would be seen here
        Problem("llama3_8b/prefill_2048/f32", ((2048, 0),), 2, 1, 128),
        Problem(
            "gemma2/window_softcap/bf16",
            MIXED,
            4,
            2,
            256,
            dtype=bf16,
            page_size=64,
            window_size_left=63,
            softcap=50.0,
            softmax_scale=0.0625,
        ),
        Problem("mistral/window/f32", MIXED, 4, 2, 64, page_size=8, window_size_left=32),
        Problem(
            "mistral/window_both/f32",
            MIXED,
            4,
            2,
            64,
            causal=False,
            window_size_left=32,
            window_size_right=7,
        ),
        Problem(
            "gpt_oss/sinks_window/bf16",
            MIXED,
            8,
            1,
            64,
            dtype=bf16,
            page_size=16,
            sinks=True,
            window_size_left=127,
        ),
        Problem("bloom/alibi/f16", MIXED, 6, 6, 64, dtype=f16, alibi="heads", page_size=16),
        Problem("mpt/alibi_batch/f32", MIXED, 6, 3, 40, alibi="batch"),
        Problem(
            "t5/bias/f32",
            RAGGED,
            4,
            4,
            64,
            bias="float",
            bias_heads="all",
            causal=False,
            softmax_scale=1.0,
        ),
        Problem(
            "deepseek_mla/decode/bf16",
            ((1, 200), (2, 64), (1, 0)),
            16,
            1,
            576,
            512,
            dtype=bf16,
            page_size=64,
            cache_layout="mla",
            softmax_scale=0.0722,
        ),
        Problem("deepseek/prefill/bf16", RAGGED, 4, 4, 192, 128, dtype=bf16),
        Problem(
            "vllm_cache/mixed/bf16",
            MIXED,
            8,
            2,
            80,
            dtype=bf16,
            page_size=16,
            cache_layout="packed_last",
        ),
        Problem(
            "transformers_cache/mixed/f32",
            MIXED,
            4,
            2,
            32,
            page_size=256,
            cache_layout="interleaved",
        ),
        Problem("sglang/page1/f16", ((1, 40), (9, 20)), 4, 2, 112, dtype=f16, page_size=1),
        Problem(
            "nano_vllm/cu_seqlens_k/bf16",
            MIXED,
            4,
            2,
            64,
            dtype=bf16,
            page_size=256,
            cache_layout="nhd",
            lengths="cu_seqlens_k",
        ),
        Problem("torch_varlen/packed_seqused/f32", MIXED, 4, 2, 64),
        Problem("training/dropout/f32", RAGGED, 4, 2, 64, dropout_p=0.2, lengths="none"),
        Problem("more_queries_than_keys/f32", ((9, -4), (70, -30), (3, -3)), 4, 2, 64),
        Problem("odd_sizes/f32", MIXED, 3, 1, 37, 5, page_size=3),
        Problem("tiny_head/bf16", MIXED, 2, 2, 1, dtype=bf16),
        Problem(
            "phi3_small/local_strided/bf16",
            MIXED,
            8,
            2,
            96,
            dtype=bf16,
            page_size=16,
            layout=Layout(64, 64, "all", density=0.4),
        ),
        Problem(
            "blocksparse/shared_layout/f32",
            MIXED,
            4,
            2,
            64,
            page_size=32,
            layout=Layout(16, 32, "kv", density=0.5),
        ),
        Problem(
            "blocksparse/batched/f32",
            MIXED,
            4,
            2,
            48,
            layout=Layout(32, 16, "one", True, 0.5),
            causal=False,
        ),
        Problem(
            "blocksparse/wide_blocks/f16",
            MIXED,
            4,
            2,
            64,
            dtype=f16,
            page_size=16,
            sinks=True,
            layout=Layout(128, 256, "one", density=0.7),
            window_size_left=200,
        ),
    )
}

SHORT = ((5, 0), (67, 0), (0, 9), (1, 33), (30, 14))

# What trains beside them: packed, and short enough for the slowest device.
TRAINING = {
    p.name: p
    for p in (
        Problem("training/long/bf16", ((40, 2000), (500, 0)), 2, 1, 64, dtype=bf16),
        Problem("training/mqa_window/f16", SHORT, 4, 1, 64, dtype=f16, window_size_left=20),
        Problem("training/head_dim_80/bf16", SHORT, 4, 4, 80, dtype=bf16, padding_rows=3),
        Problem(
            "training/gemma2/bf16",
            SHORT,
            4,
            2,
            256,
            dtype=bf16,
            softcap=5.0,
            window_size_left=24,
            softmax_scale=0.08,
        ),
        Problem(
            "training/gpt_oss/bf16",
            SHORT,
            8,
            1,
            64,
            dtype=bf16,
            sinks=True,
            window_size_left=16,
            lengths="none",
        ),
        Problem(
            "training/sinks_of_rows_without_keys/f32",
            ((9, -4), (20, 0), (3, -3)),
            4,
            2,
            32,
            sinks=True,
        ),
        Problem(
            "training/one_bias/bf16",
            SHORT,
            4,
            2,
            64,
            dtype=bf16,
            bias="float",
            softcap=7.0,
            causal=False,
        ),
        Problem("training/bias_of_heads/f32", SHORT, 4, 2, 40, bias="float", bias_heads="all"),
        Problem(
            "training/bool_bias/f16",
            SHORT,
            2,
            2,
            64,
            dtype=f16,
            bias="bool",
            bias_heads="all",
            fused_qkv=True,
        ),
        Problem("training/alibi/bf16", SHORT, 4, 2, 64, dtype=bf16, alibi="heads", causal=False),
        Problem(
            "training/everything/f32",
            SHORT,
            4,
            2,
            24,
            40,
            padding_rows=2,
            window_size_left=40,
            window_size_right=5,
            causal=False,
            softcap=4.0,
            alibi="batch",
            bias="float",
            sinks=True,
            dropout_p=0.25,
        ),
        Problem("training/dropout/bf16", SHORT, 4, 2, 128, dtype=bf16, dropout_p=0.1),
        Problem(
            "training/blocksparse/bf16",
            SHORT,
            4,
            2,
            64,
            dtype=bf16,
            layout=Layout(16, 32, "all", density=0.5),
        ),
        Problem(
            "training/blocksparse_wide/f32",
            ((70, 0), (5, 130)),
            4,
            2,
            32,
            layout=Layout(64, 128, "kv", density=0.6),
            softcap=3.0,
            window_size_left=90,
        ),
    )
}


def trains(problem: Problem) -> bool:
    """Whether the contract has gradients of a problem."""
    floats = {problem.kv_dtype, problem.out_dtype} <= {None, problem.dtype}
    is_packed = problem.page_size is None and not problem.latent
    return is_packed and problem.dtype.itemsize > 1 and floats


# Every problem with gradients, but one whose formula takes a minute.
DIFFERENTIABLE = {p.name: p for p in PROBLEMS.values() if trains(p)} | TRAINING
del DIFFERENTIABLE["llama3_8b/prefill_2048/f32"]

# queries of a shard, the share of its keys, and where its first query stands
RANGES = ((40, 60), (33, -10), (0, 12), (70, 0), (1, 130))
SHARDS = (100, 7, 0, -9, 64)
# as a rank of several sees it: Lk are its keys, queries the newest of all ranks'
DEALT = ((5, 120), (1, 60), (40, -30), (3, 11), (2, -2))
NEWEST = (490, 243, 9, 40, 4)

# With arguments that a backend may lack, see `Problem.optional`.
EXTENDED = {
    p.name: p
    for p in (
        Problem(
            "eagle/tree_verify/bf16",
            ((8, 300), (40, 21), (1, 5), (6, -2), (0, 9)),
            8,
            2,
            64,
            dtype=bf16,
            page_size=16,
            tail=True,
            causal=False,
        ),
        Problem("ring/zigzag/f32", RANGES, 4, 2, 64, k_ranges="shared", q_positions=SHARDS),
        Problem(
            "ring/window_alibi/bf16",
            RANGES,
            4,
            2,
            128,
            dtype=bf16,
            k_ranges="apart",
            q_positions=SHARDS,
            window_size_left=30,
            window_size_right=11,
            causal=False,
            alibi="heads",
        ),
        Problem(
            "dcp/speculative/bf16",
            DEALT,
            8,
            2,
            128,
            dtype=bf16,
            page_size=16,
            q_positions=NEWEST,
            key_ranks=4,
            key_rank=2,
        ),
        Problem(
            "dcp/window_alibi/f32",
            DEALT,
            4,
            2,
            40,
            page_size=8,
            q_positions=NEWEST,
            key_ranks=3,
            key_rank=1,
            key_interleave=16,
            window_size_left=150,
            alibi="batch",
        ),
        Problem(
            "dcp/blocksparse/f32",
            DEALT,
            4,
            2,
            32,
            page_size=16,
            q_positions=NEWEST,
            key_ranks=2,
            key_rank=1,
            key_interleave=8,
            layout=Layout(32, 64, "kv", density=0.6),
        ),
        Problem(
            "cp/blocksparse/bf16",
            RANGES,
            4,
            2,
            64,
            dtype=bf16,
            k_ranges="shared",
            q_positions=SHARDS,
            layout=Layout(16, 32, "all", density=0.6),
        ),
        Problem(
            "deepseek_mla/latent/bf16",
            ((1, 200), (2, 64), (70, 5), (1, 0)),
            16,
            1,
            64,
            512,
            dtype=bf16,
            page_size=64,
            latent=True,
            softmax_scale=0.0722,
        ),
        Problem(
            "deepseek_mla/latent_e4m3/bf16",
            ((1, 200), (2, 64), (33, 0)),
            16,
            1,
            64,
            256,
            dtype=bf16,
            v_dtype=e4m3,
            page_size=16,
            latent=True,
            descale="heads",
            softmax_scale=0.0722,
        ),
        Problem("latent/grouped/f32", MIXED, 4, 2, 24, 40, latent=True, softcap=9.0, sinks=True),
        Problem(
            "rl/invariant/f16", MIXED, 8, 2, 128, dtype=f16, page_size=16, batch_invariant=True
        ),
        Problem(
            "tp/dropout_base/f32",
            RAGGED,
            4,
            2,
            64,
            dropout_p=0.2,
            lengths="none",
            dropout_base=(12, 1001, 70),
        ),
    )
}

# Those of them that have gradients, and more.
EXTENDED_DIFFERENTIABLE = {p.name: p for p in EXTENDED.values() if trains(p)} | {
    p.name: p
    for p in (
        Problem(
            "training/zigzag/bf16",
            RANGES,
            4,
            2,
            64,
            dtype=bf16,
            k_ranges="shared",
            q_positions=SHARDS,
            window_size_left=60,
        ),
        Problem(
            "training/dealt/f32",
            DEALT,
            4,
            2,
            32,
            q_positions=NEWEST,
            key_ranks=3,
            key_rank=1,
            key_interleave=4,
            alibi="heads",
        ),
        Problem("training/tail_mask/f16", SHORT, 4, 2, 64, dtype=f16, tail=True, causal=False),
    )
}
