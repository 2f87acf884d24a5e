"""vLLM's CPU attention and SGLang's, from the one library that `get_peers.sh` brings.

vLLM keeps keys transposed within a block, so its caches are its own; its plan
(`get_scheduler_metadata`) is made once per model step for all layers and is not timed. SGLang
addresses single tokens; its kernels read a cache of whole tokens.
"""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from baselines import Prepared, keys_and_values, queries
from torch import Tensor
from workloads import CacheWriteWorkload, sequence_lengths

from torch_paged_attn.testing import Call

LIBRARY = Path(__file__).parents[1] / ".peer/vllm/_C.abi3.so"
FLOAT8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


@functools.cache
def missing() -> str | None:
    """Load the library. Why it cannot be used, or None."""
    if not LIBRARY.exists():
        return "not here: benchmarks/get_peers.sh brings it"
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        return f"does not load: {error}"
    return None


@functools.cache
def missing_latents() -> str | None:
    """Load the library that has attention to latents for this machine. Why it cannot, or None."""
    is_avx512 = torch.cpu._is_avx512_supported()
    library = LIBRARY.with_name(f"_C_{'AVX512' if is_avx512 else 'AVX2'}.abi3.so")
    if not library.exists():
        return "not here: benchmarks/get_peers.sh brings it"
    torch.ops.load_library(str(library))
    return None


def latent_decode(
    q: Tensor, batch: int, keys: int, scale: float, width: int, width_v: int
) -> Callable[[], Tensor]:
    """`mla_decode_kvcache` of one query a sequence over `keys` latents of its own."""
    page = 16
    cache = torch.randn(batch * keys // page, page, width).to(q.dtype)
    table = torch.randperm(len(cache)).int().view(batch, -1)
    lengths = torch.full((batch,), keys, dtype=torch.int32)
    out = q.new_empty(*q.shape[:2], width_v)

    def run() -> Tensor:
        torch.ops._C.mla_decode_kvcache(out, q, cache, scale, table, lengths)
        return out

    run()
    rows = cache[table[0].long()].flatten(0, 1).float()
    want = torch.softmax(q[0].float() @ rows.mT * scale, -1) @ rows[:, :width_v]
    assert (out[0].float() - want).norm() < 0.01 * want.norm()
    return run


def token_slots(call: Call, page_size: int) -> list[Tensor]:
    """For each sequence, the slots of its tokens in a cache whose pages are in random order."""
    counts = [-(-key_len // page_size) for _, key_len in sequence_lengths(call)]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    return [
        (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:key_len]
        for pages, (_, key_len) in zip(order.split(counts), sequence_lengths(call), strict=True)
    ]


def padded(rows: list[Tensor]) -> Tensor:
    """Rows of different lengths as one int32 matrix."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).int()


class VllmCaches:
    """vLLM's paged caches, and the instruction set and layout that it picks on this machine."""

    def __init__(self, num_pages: int, heads: int, dim: int, page: int, dtype: torch.dtype) -> None:
        amx = torch.cpu._is_amx_tile_supported() and dtype == torch.bfloat16
        self.isa = "vec16" if page % 32 else "amx" if amx else "vec"
        self.kind = FLOAT8.get(dtype, "auto")
        stored = torch.uint8 if dtype in FLOAT8 else dtype
        both = torch.zeros(num_pages, heads, 2 * page, dim, dtype=stored)
        self.k, self.v = both.chunk(2, dim=2)

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        torch.ops._C.cpu_attn_reshape_and_cache(
            key, value, self.k, self.v, slots, self.isa, 1.0, 1.0, self.kind
        )


class Vllm:
    """`cpu_attention_with_kv_cache` with pages of a given size."""

    def __init__(self, page_size: int) -> None:
        self.name, self.page_size = f"vLLM p{page_size}", page_size

    def unavailable(self, call: Call) -> str | None:
        if reason := missing():
            return reason
        if call.op == "blocksparse":
            return "no block-sparse attention"
        if not call.args["causal"]:
            return "called for causal attention only"
        if call.args["q"].shape[-1] % 32:
            return "head_dim must be a multiple of 32"
        if call.args["q"].shape[-1] != call.args["v"].shape[-1]:
            return "keys and values are of one size"
        if self.page_size % 32 and call.args["k"].dtype in FLOAT8:
            return "float8 caches need pages of 32 and more"
        return "no int8 cache" if call.args["k"].dtype == torch.int8 else None

    def prepare(self, call: Call) -> Prepared:
        q, k = call.args["q"], call.args["k"]
        (_, num_heads, dim), num_kv_heads = q.shape, k.shape[1]
        lengths, slots = sequence_lengths(call), token_slots(call, self.page_size)
        num_pages = sum(-(-key_len // self.page_size) for _, key_len in lengths)
        caches = VllmCaches(num_pages, num_kv_heads, dim, self.page_size, k.dtype)
        scales = tuple(float(call.args.get(name, 1.0)) for name in ("k_descale", "v_descale"))
        for b, where in enumerate(slots):
            # float8 values as they are stored: vLLM's own rounding to float8 truncates
            stored = keys_and_values(call, b, descaled=False)
            caches.write(*(x.transpose(0, 1).contiguous() for x in stored), where)
        table = padded([where[:: self.page_size] // self.page_size for where in slots])
        seq_lens = torch.tensor([key_len for _, key_len in lengths], dtype=torch.int32)
        bounds, out = call.args["cu_seqlens_q"], torch.empty_like(q)

        @functools.cache
        def plan(_threads: int) -> Tensor:
            heads = (len(lengths), num_heads, num_kv_heads, dim)
            make = torch.ops._C.get_scheduler_metadata
            options = (
                *heads,
                seq_lens,
                q.dtype,
                bounds,
                True,
                -1,
                caches.isa,
                True,
                None,
                caches.kind,
            )
            # before 0.25 plans do not depend on the cache's dtype
            return make(*options[: len(make.default._schema.arguments)])

        def run() -> None:
            torch.ops._C.cpu_attention_with_kv_cache(
                q, caches.k, caches.v, out, bounds, seq_lens, dim**-0.5, True, None, -1, table, 0.0,
                plan(torch.get_num_threads()), None, None, *scales, caches.kind,
            )  # fmt: skip

        return Prepared(run, lambda _: out)


class Sglang:
    """`decode_attention_cpu` for one query token a sequence, else `extend_attention_cpu`."""

    name = "SGLang"

    def unavailable(self, call: Call) -> str | None:
        if reason := missing():
            return reason
        if call.op == "blocksparse":
            return "no block-sparse attention"
        if not call.args["causal"]:
            return "called for causal attention only"
        if not hasattr(torch.ops._C, "decode_attention_cpu"):
            return "not in this version of vLLM's library"
        dtypes = (torch.bfloat16, torch.float16)
        if call.args["q"].dtype not in dtypes or call.args["k"].dtype not in dtypes:
            return "bfloat16 and float16 only"
        return None

    def prepare(self, call: Call) -> Prepared:
        q, v, lengths = queries(call), call.args["v"], sequence_lengths(call)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        slots = token_slots(call, call.args["k"].shape[2] if "block_table" in call.args else 16)
        used = 1 + max(int(where.max()) for where in slots)
        dense = [keys_and_values(call, b) for b in range(len(lengths))]
        buffers = []
        for parts in zip(*dense, strict=True):
            buffer = q.new_zeros(used, *parts[0].transpose(0, 1).shape[1:])
            for where, part in zip(slots, parts, strict=True):
                buffer[where] = part.transpose(0, 1)
            buffers.append(buffer)
        scale = call.args.get("softmax_scale") or q.shape[-1] ** -0.5
        if is_latent(call):  # as vLLM's AMX_MLA calls it: values are the first of the keys
            width = v.shape[-1]
            if call.args.get("q_latent") is not None:
                q, buffers[0] = q.roll(width, -1), buffers[0].roll(width, -1)
            buffers[1] = buffers[0][..., :width]
        query_lens, seq_lens = (torch.tensor(x) for x in zip(*lengths, strict=True))
        where, pool = padded(slots), torch.arange(len(lengths))
        options = (scale, 0.0, False, -1, None, None)

        if int(query_lens.max()) == 1:
            partial = torch.empty(len(lengths), q.shape[1], 8, out.shape[-1] + 1)
            args = (q, *buffers, out, None, None, None, partial, where, pool, seq_lens, *options)
            return Prepared(lambda: torch.ops._C.decode_attention_cpu(*args), lambda _: out)

        # the new tokens once more, packed: SGLang reads the cache for the context only
        new = [
            torch.cat([buffer[s[-n:]] for s, n in zip(slots, query_lens.tolist(), strict=True)])
            for buffer in buffers
        ]
        starts, longest = call.args["cu_seqlens_q"][:-1], int(query_lens.max())
        lens = (seq_lens, query_lens.int(), starts, longest)
        args = (q, *new, out, *buffers, where, pool, *lens, *options)
        return Prepared(lambda: torch.ops._C.extend_attention_cpu(*args), lambda _: out)


def is_latent(call: Call) -> bool:
    """Whether values are (part of) the keys: DeepSeek's latent attention."""
    k, v = call.args["k"], call.args["v"]
    return call.args.get("q_latent") is not None or k.data_ptr() == v.data_ptr()


class VllmMla:
    """`mla_decode_kvcache`, vLLM's CPU_MLA, with its pages of 16."""

    name = "vLLM MLA"
    page_size = 16

    def unavailable(self, call: Call) -> str | None:
        if reason := missing():
            return reason
        if not is_latent(call):
            return "latent attention only"
        longest = max(query_len for query_len, _ in sequence_lengths(call))
        return "one query a sequence" if longest > 1 else None

    def prepare(self, call: Call) -> Prepared:
        width = call.args["v"].shape[-1]
        q, lengths, slots = queries(call), sequence_lengths(call), token_slots(call, self.page_size)
        num_pages = sum(-(-key_len // self.page_size) for _, key_len in lengths)
        cache = q.new_zeros(num_pages * self.page_size, q.shape[-1])
        split = call.args.get("q_latent") is not None
        for b, where in enumerate(slots):
            dense = keys_and_values(call, b)[0][0]
            cache[where] = dense.roll(width, -1) if split else dense  # latents come first
        cache = cache.view(num_pages, self.page_size, -1)
        q = q.roll(width, -1) if split else q
        table = padded([where[:: self.page_size] // self.page_size for where in slots])
        seq_lens = torch.tensor([key_len for _, key_len in lengths], dtype=torch.int32)
        scale = call.args.get("softmax_scale") or q.shape[-1] ** -0.5
        out = q.new_empty(*q.shape[:2], width)
        args = (out, q, cache, scale, table, seq_lens)
        return Prepared(lambda: torch.ops._C.mla_decode_kvcache(*args), lambda _: out)


class VllmWrite:
    """`cpu_attn_reshape_and_cache`: transposes the keys while it writes them."""

    name = "vLLM write"

    def unavailable(self, work: CacheWriteWorkload) -> str | None:
        return missing()

    def prepare(self, work: CacheWriteWorkload) -> Prepared:
        pages, heads, page_size, dim = work.cache_shape
        page = 128
        num_pages = -(-pages * page_size // page)
        caches = VllmCaches(num_pages, heads, dim, page, work.benchmark.cache_dtype)
        slots = itertools.cycle(work.slot_mappings)
        return Prepared(lambda: caches.write(work.key, work.value, next(slots)), lambda _: None)


VLLM_PEERS = (Vllm(128), Vllm(16), VllmMla(), Sglang())
