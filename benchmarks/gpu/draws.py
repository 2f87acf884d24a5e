"""Serving steps drawn from a seed: what an engine may send, as plain numbers.

They cannot be tuned to: published figures come from seeds that were not used while tuning.
"""

import dataclasses
import math
import random

KINDS = {"decode": 8, "speculation": 3, "chunk": 4, "mixed": 5, "encoder": 3}
"""How often each kind is drawn: one token a sequence; 2 to 8, as guessed ones are verified; chunks
of prompts behind a prefix; one or two chunks among decodes; whole sequences that see all their
keys, packed."""

# query heads, KV heads, head_dim of real models
HEADS = (
    (32, 8, 128), (64, 8, 128), (28, 4, 128), (40, 8, 128), (16, 4, 128), (8, 1, 128),
    (32, 32, 128), (64, 8, 64), (8, 4, 256),
)  # fmt: skip
ENCODER_HEADS = ((12, 12, 64), (16, 16, 64), (32, 8, 128), (28, 4, 128))

# pages of engines, and how often
PAGES = {16: 6, 32: 2, 64: 4, 128: 3, 1: 2, 544: 2}
# tokens that a block table has room for: an engine's longest context, not a batch's
WIDTHS = (8192, 32768, 131072)

LEAST_CONTEXT, MOST_CONTEXT = 64, 131072
# of keys and values that one call reads, so that calls with other pages fit beside it
MOST_BYTES = 3 << 29
# of a table of pages of one token
MOST_ENTRIES = 1 << 21


@dataclasses.dataclass(frozen=True)
class Step:
    """One attention call of an engine. Sequence b has `queries[b]` new tokens, and `keys[b]` keys
    with them. Without pages, keys are packed.
    """

    kind: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page_size: int = 0
    table_width: int = 0  # keys that a row of the block table has room for
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    window: int = -1  # keys seen before the own one
    sinks: bool = False
    causal: bool = True

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} d{self.head_dim}"
        options = [f"p{self.page_size}"] if self.page_size else []
        options += [self.dtype] if self.dtype != "bfloat16" else []
        options += [f"kv {self.kv_dtype}"] if self.kv_dtype != self.dtype else []
        options += [f"window {self.window}"] if self.window >= 0 else []
        options += ["sinks"] if self.sinks else []
        sizes = f"b{len(self.queries)} q{_range(self.queries)} k{_range(self.keys)}"
        return " ".join([self.kind, heads, sizes, *options])

    @property
    def batch(self) -> int:
        return len(self.queries)

    @property
    def total_q(self) -> int:
        return sum(self.queries)

    @property
    def bytes(self) -> int:
        """Keys and values that somebody sees, each once."""
        each = 2 * self.num_kv_heads * self.head_dim * (2 if self.kv_dtype == self.dtype else 1)
        return sum(self._reach(*lengths) for lengths in self._lengths()) * each

    @property
    def flops(self) -> float:
        """Of the two products, for visible pairs of query and key, about."""
        pairs = 0.0
        for queries, keys in self._lengths():
            seen = keys - (queries - 1) / 2 if self.causal else keys
            pairs += queries * (min(seen, self.window + 1) if self.window >= 0 else seen)
        return 4 * self.num_heads * self.head_dim * pairs

    def _lengths(self):
        return zip(self.queries, self.keys, strict=True)

    def _reach(self, queries: int, keys: int) -> int:
        return min(keys, self.window + queries) if self.window >= 0 else keys


def _range(lengths: tuple[int, ...]) -> str:
    low, high = min(lengths), max(lengths)
    return f"{low}" if low == high else f"{low}-{high}"


def _log_uniform(random: random.Random, low: float, high: float) -> int:
    return round(math.exp(random.uniform(math.log(low), math.log(high))))


def _pick(random: random.Random, weights: dict):
    return random.choices([*weights], [*weights.values()])[0]


def _queries(random: random.Random, kind: str) -> list[int]:
    """New tokens of each sequence."""
    if kind == "encoder":
        batch, length = _log_uniform(random, 4, 512), _log_uniform(random, 32, 512)
        if random.random() < 0.5:
            return [length] * batch
        return [_log_uniform(random, max(length / 8, 4), length) for _ in range(batch)]
    if kind == "chunk":
        return [_log_uniform(random, 64, 2048) for _ in range(random.choice((1, 1, 1, 2, 4)))]
    if kind == "mixed":
        chunks = [_log_uniform(random, 64, 2048) for _ in range(random.choice((1, 1, 2)))]
        return [1] * _log_uniform(random, 8, 256) + chunks
    batch = _log_uniform(random, 1, 256)
    if kind == "speculation":
        length = random.randint(2, 8)
        if random.random() < 0.7:
            return [length] * batch
        return [random.randint(1, length) for _ in range(batch)]
    return [1] * batch


def _contexts(random: random.Random, batch: int) -> list[int]:
    """Keys of each sequence: about the same, or anything up to some length."""
    longest = _log_uniform(random, LEAST_CONTEXT, MOST_CONTEXT)
    if random.random() < 0.5:
        return [max(LEAST_CONTEXT, int(longest * random.uniform(0.9, 1.0))) for _ in range(batch)]
    return [_log_uniform(random, LEAST_CONTEXT, longest) for _ in range(batch)]


def draw_step(random: random.Random) -> Step:
    """The next step."""
    kind = _pick(random, KINDS)
    heads = random.choice(ENCODER_HEADS if kind == "encoder" else HEADS)
    queries = _queries(random, kind)
    dtype = "float16" if random.random() < 0.1 else "bfloat16"
    if kind == "encoder":
        lengths = tuple(queries)
        return Step(kind, *heads, lengths, lengths, dtype=dtype, kv_dtype=dtype, causal=False)
    page_size = _pick(random, PAGES)
    kv_dtype = "float8_e4m3fn" if random.random() < 0.08 else dtype
    _, num_kv_heads, head_dim = heads
    each = 2 * num_kv_heads * head_dim * (1 if kv_dtype != dtype else 2)
    contexts = _contexts(random, len(queries))
    most = min(MOST_BYTES // each, MOST_ENTRIES * page_size)
    shrink = min(1.0, most / sum(contexts))
    contexts = [max(1, int(n * shrink)) for n in contexts]
    keys = tuple(q + n for q, n in zip(queries, contexts, strict=True))
    widths = [w for w in WIDTHS if w >= max(keys)] or [max(keys)]
    width = random.choice(widths)
    if len(keys) * -(-width // page_size) > 4 * MOST_ENTRIES:
        width = widths[0]
    window, sinks = -1, False
    if random.random() < 0.12:
        window = random.choice((127, 1023, 4095))
        sinks = random.random() < 0.5
    return Step(
        kind, *heads, tuple(queries), keys, page_size, width, dtype, kv_dtype, window, sinks
    )  # fmt: skip


def draw_steps(seed: int, count: int) -> list[Step]:
    """The first `count` steps of a seed."""
    numbers = random.Random(seed)
    return [draw_step(numbers) for _ in range(count)]
