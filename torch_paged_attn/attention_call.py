"""The list of attention arguments, and `AttentionCall`: the values of one call under their names.

The fields of `AttentionCall` are the list; for `blocksparse` also those of `BlockLayout`, for
`selected_attention` those of `Selection`.
Schemas, the public functions, checks, backends and tests take names, order, types, defaults and
meanings from it: a new argument is a new field.
"""

import dataclasses
import functools
import re
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn import environment
from torch_paged_attn.argument import Argument, argument, listed
from torch_paged_attn.selection import NOT_SELECTED, Selection

# properties of a call that follow from numbers of tokens and sequences, and those that do not
OF_SIZES = "total_q", "batch"
OF_KIND = (
    *("num_heads", "num_kv_heads", "group_size", "head_dim", "head_dim_v", "is_slots", "is_paged"),
    *("page_size", "scale", "result_dtype", "derived"),
)

# columns of a latent that share a scale
LATENT_COLUMNS = 128


@dataclasses.dataclass(slots=True, eq=False)
class BlockLayout:
    """A block-sparse mask in CSR: rows are blocks of query positions, columns blocks of keys."""

    crow_indices: Tensor = argument(
        shape="`([batch,] H, rows + 1)` int32",
        per_sequence=3,
        meaning="H is 1, num_kv_heads or num_heads; query head `h` follows layout head"
        " `h // (num_heads // H)`. `rows` covers every position in use.",
    )
    col_indices: Tensor = argument(
        shape="`([batch,] H, nnz)` int32",
        per_sequence=3,
        meaning="The columns of a row are unique, in any order; one that lies wholly past Lk is"
        " ignored.",
    )
    q_block_size: int = argument(64, meaning="16, 32, 64, 128 or 256.")
    k_block_size: int = argument(64, meaning="16, 32, 64, 128 or 256.")


@dataclasses.dataclass(slots=True, eq=False)
class Destination:
    """What `flash_varlen_out` takes before the arguments of `flash_varlen`."""

    out: Tensor = argument(
        shape="`(total_q, num_heads, head_dim_v)`",
        meaning="Written, padding rows included. Of q's dtype, or float8 (with `out_scale`). Any"
        " strides whose last one is 1. It shares no memory with an input.",
        is_written=True,
    )


HINT = "Scheduling hint; no result depends on it. None: taken from shapes."
DESCALE: dict[str, Any] = {
    "shape": "`()`, `(num_kv_heads,)` or `(batch, num_kv_heads)` float32",
    "per_sequence": 2,
    "meaning": "Stored value times descale is the real value.",
    "in_backward": False,
    "is_constant": True,
}
KEY_DESCALE = DESCALE | {
    "shape": "`()`, `(num_kv_heads,)`, `(batch, num_kv_heads)`, or by token `(num_pages,"
    " num_kv_heads, page_size)` (packed: `(total_k, num_kv_heads)`), float32",
    "meaning": "Stored value times descale is the real value. By token: any strides, such as a view"
    " of bytes inside the pages; slots that no query sees may hold anything. A packed"
    " `(total_k, num_kv_heads)` with as many tokens as sequences is `(batch, num_kv_heads)`.",
}
WINDOW = "Keys seen before (left) and after (right) the position, inclusive; negative: unbounded."

KEY_RANKS = (
    "A cache dealt out over ranks, in runs of `I = key_interleave` keys: key `j` stands at position"
    " `(j // I) * I * key_ranks + key_rank * I + j % I`. Masks, windows, ALiBi and block columns"
    " compare positions. At most 32768 ranks."
)


@dataclasses.dataclass(eq=False)
class AttentionCall:
    """One call of `flash_varlen`, `blocksparse` or `selected_attention`. It is never changed: what
    follows from shapes is read from them once."""

    op: str
    q: Tensor = argument(
        shape="`(total_q, num_heads, head_dim)`",
        meaning="float32, bfloat16, float16, float8_e4m3fn or float8_e5m2.",
    )
    k: Tensor = argument(
        shape="`(total_k, num_kv_heads, head_dim)`",
        meaning="With `block_table` pages `(num_pages, num_kv_heads, page_size, head_dim)`. Of q's"
        " dtype, or float8 or int8, or uint8 for int4: `head_dim / 2` bytes, the even number in"
        " the low bits, two's complement. Any strides whose last one is 1: a transposed cache, two"
        " halves of one storage, slices of a fused projection. `num_kv_heads` divides `num_heads`;"
        " query head `h` reads KV head `h // (num_heads // num_kv_heads)`.",
    )
    v: Tensor = argument(
        shape="`(total_k, num_kv_heads, head_dim_v)`",
        meaning="With `block_table` pages `(num_pages, num_kv_heads, page_size, head_dim_v)`. Of"
        " k's dtype; any strides whose last one is 1.",
    )
    cu_seqlens_q: Tensor = argument(
        shape="`(batch + 1,)` int32", meaning="Nondecreasing, from 0 to at most `total_q`."
    )
    cu_seqlens_k: Tensor | None = argument(
        None,
        shape="`(batch + 1,)` int32",
        meaning="Packed: where each sequence's keys start; None means cu_seqlens_q. Paged: gives"
        " `Lk` by its differences when `seqused_k` is None.",
    )
    max_seqlen_q: int = argument(0, meaning=HINT, is_hint=True)
    max_seqlen_k: int = argument(0, meaning=HINT, is_hint=True)
    seqused_k: Tensor | None = argument(
        None,
        shape="`(batch,)` int32",
        per_sequence=1,
        meaning="`Lk`. Packed: cuts the lengths of `cu_seqlens_k` short.",
    )
    block_table: Tensor | None = argument(
        None,
        shape="`(batch, max_pages)` int32",
        per_sequence=2,
        in_backward=False,
        meaning="Page `i` of a sequence holds its keys `i * page_size` to `(i + 1) * page_size -"
        " 1`. Entries past `ceil(Lk / page_size)` may hold anything.",
    )
    attn_bias: Tensor | None = argument(
        None,
        shape="`(1 or num_heads, total_q, >= max Lk)` float32, bfloat16, float16 or bool",
        meaning="Any strides: bias of query token `i` on the `j`-th key of its sequence (tree masks"
        " too).",
    )
    alibi_slopes: Tensor | None = argument(
        None,
        is_constant=True,
        shape="`(num_heads,)` or `(batch, num_heads)` float32",
        per_sequence=2,
        meaning="Slope of each head's bias on the distance between query and key.",
    )
    sinks: Tensor | None = argument(
        None, shape="`(num_heads,)` float32", meaning="One extra logit in the denominator only."
    )
    q_descale: Tensor | None = argument(None, **DESCALE)
    k_descale: Tensor | None = argument(None, **KEY_DESCALE)
    v_descale: Tensor | None = argument(
        None,
        **KEY_DESCALE
        | {
            "meaning": f"{KEY_DESCALE['meaning']} With `q_latent` also for each {LATENT_COLUMNS}"
            f" numbers of a token's latents: `(..., head_dim_v / {LATENT_COLUMNS})`."
        },
    )
    out_scale: Tensor | None = argument(
        None,
        is_constant=True,
        shape="`()` or `(1,)` float32",
        in_backward=False,
        meaning="For a float8 output: stored = real / out_scale, rounded to nearest even and"
        " saturated.",
    )
    rng_state: Tensor | None = argument(
        None,
        shape="`(2,)` or `(5,)` int64",
        meaning="seed, offset, and where the call's head 0, row 0 and column 0 stand in a larger"
        " whole (0, 0, 0 when omitted). Required when `dropout_p > 0`. The mask is a pure function"
        " of (seed, offset, sequence, head, row, column): `reference/philox.py`.",
    )
    q_latent: Tensor | None = argument(
        None,
        is_optional=True,
        shape="`(total_q, num_heads, head_dim_v)`",
        in_backward=False,
        meaning="Of q's dtype, with q's descale; any strides whose last one is 1. Adds"
        " `q_latent . v` to `q . k` (MLA: rope keys in k, latents in v). With it v may be of q's"
        " dtype or of 8 bits whatever k is.",
    )
    tail_mask: Tensor | None = argument(
        None,
        is_optional=True,
        shape="`(total_q, >= max Lq)` bool",
        meaning="Any strides: whether query token `i` sees the newest Lq keys of its sequence,"
        " column `c` being key `Lk - Lq + c` (tree verification). All other keys it sees.",
    )
    k_start: Tensor | None = argument(
        None,
        is_optional=True,
        shape="`(batch,)` int32",
        per_sequence=1,
        meaning="Packed keys only: a sequence's keys are rows `k_start` to `k_start + Lk - 1`."
        " Ranges may overlap and leave gaps.",
    )
    q_position: Tensor | None = argument(
        None,
        is_optional=True,
        shape="`(batch,)` int32",
        per_sequence=1,
        meaning="Position of a sequence's first query, instead of `Lk - Lq`; may be negative.",
    )
    _: dataclasses.KW_ONLY
    softmax_scale: float | None = argument(
        None, meaning="Factor of `q . k`; `head_dim ** -0.5` when omitted. At most 2**126 in size."
    )
    causal: bool = argument(
        False,
        meaning="Hide the keys that come after the query; clamps `window_size_right` to 0.",
    )
    window_size_left: int = argument(-1, meaning=WINDOW)
    window_size_right: int = argument(-1, meaning=WINDOW)
    softcap: float = argument(
        0.0, meaning="0 (off) or 2**-126 to 2**126. Comes before ALiBi and bias."
    )
    dropout_p: float = argument(
        0.0, meaning="In [0, 1); kept probabilities are divided by `1 - dropout_p`."
    )
    out_dtype: torch.dtype | None = argument(
        None, meaning="dtype of `out`, that of `q` when omitted.", in_backward=False
    )
    deterministic: bool = argument(
        True,
        meaning="Of the backward: the same bits every time. False lets it add up in whatever order"
        " is fastest, unless `torch.use_deterministic_algorithms(True)` asks for the same bits.",
    )
    batch_invariant: bool = argument(
        False,
        is_optional=True,
        in_backward=False,
        meaning="The bits of a query depend on its sequence alone: not on the batch, the chunking"
        " of its prompt, nor on decode or prefill. `PAGED_ATTN_BATCH_INVARIANT=1` asks this of all"
        " calls.",
    )
    key_ranks: int = argument(1, meaning=KEY_RANKS, is_optional=True)
    key_rank: int = argument(0, meaning=KEY_RANKS, is_optional=True)
    key_interleave: int = argument(1, meaning=KEY_RANKS, is_optional=True)
    layout: BlockLayout | None = None
    selection: Selection | None = None
    out: Tensor | None = None
    """Where the result goes; None: into a new tensor."""

    @classmethod
    def flash_varlen(cls, *args: Any, **kwargs: Any) -> "AttentionCall":
        """From the arguments of the operator `flash_varlen`."""
        return cls("flash_varlen", *args, **kwargs)

    @classmethod
    def flash_varlen_out(cls, out: Tensor, *args: Any, **kwargs: Any) -> "AttentionCall":
        """From the arguments of the operator `flash_varlen_out`."""
        return cls("flash_varlen_out", *args, out=out, **kwargs)

    @classmethod
    def blocksparse(cls, *args: Any, **kwargs: Any) -> "AttentionCall":
        """From the arguments of the operator `blocksparse`."""
        given, layout = _split("blocksparse", BlockLayout, args, kwargs)
        return cls("blocksparse", layout=BlockLayout(**layout), **given)

    @classmethod
    def selected_attention(cls, *args: Any, **kwargs: Any) -> "AttentionCall":
        """From the arguments of the operator `selected_attention`."""
        given, selection = _split("selected_attention", Selection, args, kwargs)
        return cls("selected_attention", selection=Selection(**selection), **given)

    @functools.cached_property
    def derived(self) -> dict[Any, Any]:
        """What others have worked out from this call, by keys of their own."""
        return {}

    def given(self) -> dict[str, Any]:
        """The call's arguments by their names."""
        op = "flash_varlen" if self.out is None else "flash_varlen_out"
        own = {x.name: getattr(self, x.name) for x in arguments(op)}
        for part in (self.layout, self.selection):
            if part is not None:
                own |= {x.name: getattr(part, x.name) for x in listed(type(part))}
        return own

    def tensors(self) -> dict[str, Tensor | None]:
        """Every tensor argument by its name, None if it was not given."""
        fields = vars(self)
        own = {name: fields[name] for name in tensor_names("flash_varlen")}
        if self.out is not None:
            own["out"] = self.out
        if (layout := self.layout) is not None:
            own |= {"crow_indices": layout.crow_indices, "col_indices": layout.col_indices}
        if (selection := self.selection) is not None:
            own |= {"key_indices": selection.key_indices, "num_selected": selection.num_selected}
        return own

    def given_tensors(self) -> dict[str, Tensor]:
        """The tensors that were given, in the order of the op's list; `out`, if it is among them,
        is the last.
        """
        if self.out is not None:
            return {name: x for name, x in self.tensors().items() if x is not None}
        is_plain = self.layout is None and self.selection is None
        own = vars(self) if is_plain else self.tensors()
        return {name: x for name in tensor_names(self.op) if (x := own[name]) is not None}

    def kind(self) -> dict[str, Any]:
        """What `of_kind` takes for calls that differ from this one in sizes alone. It holds no
        tensor.
        """
        for name in OF_KIND:
            getattr(self, name)
        fields = vars(self).items()
        return {n: x for n, x in fields if n not in OF_SIZES and not isinstance(x, Tensor)}

    @classmethod
    def of_kind(cls, kind: dict[str, Any], tensors: dict[str, Tensor]) -> "AttentionCall":
        """A call of a kind with these tensors; it has all that was given to the kind's first."""
        call = object.__new__(cls)
        vars(call).update(kind, **tensors)
        return call

    @functools.cached_property
    def total_q(self) -> int:
        return self.q.shape[0]

    @functools.cached_property
    def num_heads(self) -> int:
        return self.q.shape[1]

    @functools.cached_property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @functools.cached_property
    def head_dim_v(self) -> int:
        return numbers_of(self.v)

    @functools.cached_property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @functools.cached_property
    def group_size(self) -> int:
        """The number of query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @functools.cached_property
    def batch(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def lists(self) -> Selection:
        """The selection of a call that has one."""
        assert self.selection is not None
        return self.selection

    @functools.cached_property
    def is_slots(self) -> bool:
        """Whether key_indices name units of the cache itself: pages without a block_table."""
        if self.selection is None or self.block_table is not None:
            return False
        return isinstance(self.k, Tensor) and self.k.dim() == 4

    @functools.cached_property
    def is_paged(self) -> bool:
        """Whether k and v are pages."""
        return self.block_table is not None or self.is_slots

    @functools.cached_property
    def page_size(self) -> int:
        """Tokens of a page of the KV cache; 0 if keys are packed."""
        return self.k.shape[2] if self.is_paged else 0

    @functools.cached_property
    def scale(self) -> float:
        """The factor of `q . k`."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def window_right(self) -> int:
        """Keys seen after a query's position, under `causal` too; -1 is unbounded."""
        return 0 if self.causal else self.window_size_right

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the argument `batch_invariant` or the environment variable asks for results
        whose bits depend on the query's own sequence only.
        """
        return self.batch_invariant or environment.BATCH_INVARIANT

    def key_positions(self, keys: Tensor) -> Tensor:
        """The positions in the whole sequence of keys of this rank's share of the cache.

        keys: integers of any shape, numbering the local keys of a sequence from 0
        """
        if self.key_ranks == 1:
            return keys
        runs, run = keys // self.key_interleave, self.key_interleave
        return runs * (run * self.key_ranks) + self.key_rank * run + keys % run

    def first_positions(self) -> Tensor:
        """The position of each sequence's first query, int64 `(batch,)`."""
        if self.q_position is not None:
            return self.q_position.long()
        lengths = key_lengths(self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k)
        return lengths.long() - self.cu_seqlens_q.diff()

    def first_keys(self) -> Tensor:
        """The row of k where each sequence's packed keys start, `(batch,)`."""
        if self.k_start is not None:
            return self.k_start
        return (self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k)[:-1]

    @functools.cached_property
    def result_dtype(self) -> torch.dtype:
        if self.out is not None:
            return self.out.dtype
        return self.out_dtype or self.q.dtype

    def new_results(self) -> tuple[Tensor, Tensor]:
        """Memory for `out` and `softmax_lse`: contiguous, but for an `out` that was given."""
        shape = (self.total_q, self.num_heads, self.head_dim_v)
        out = self.out
        if out is None:
            out = self.q.new_empty(shape, dtype=self.result_dtype)
        return out, self.q.new_empty((self.num_heads, self.total_q), dtype=torch.float32)


# op -> the defaults in which it differs from the fields
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "flash_varlen": {},
    "flash_varlen_out": {},
    "blocksparse": {"causal": True},
    "selected_attention": {"causal": True},
}


def _split(
    op: str, part: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call's arguments by name: those of `AttentionCall`, and those of its `part`."""
    names = [x.name for x in arguments(op)[: len(args)]]
    given = OWN_DEFAULTS[op] | dict(zip(names, args, strict=True)) | kwargs
    return given, {x.name: given.pop(x.name) for x in listed(part) if x.name in given}


@functools.cache
def arguments(op: str) -> tuple[Argument, ...]:
    """The list: what `flash_varlen`, `flash_varlen_out`, `blocksparse` or `selected_attention`
    takes, in the order of its schema.
    """
    found = listed(AttentionCall)
    if op == "flash_varlen_out":  # the dtype of the result is that of `out`
        found = listed(Destination) + tuple(x for x in found if x.name != "out_dtype")
    if op == "blocksparse":  # the layout's arguments follow q, k and v
        found = found[:3] + listed(BlockLayout) + found[3:]
    if op == "selected_attention":
        found = _with_selection(found)
    own = OWN_DEFAULTS[op]
    found = tuple(x._replace(default=own.get(x.name, x.default)) for x in found)
    return tuple(sorted(found, key=lambda x: x.keyword_only))


def _with_selection(found: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """Lists follow q, k and v, and their lengths block_table."""
    own = {x.name: x for x in listed(Selection)}
    behind = {
        "v": (own["key_indices"], own["select_size"]),
        "block_table": (own["num_selected"],),
    }
    kept = (x for x in found if x.name not in NOT_SELECTED)
    return tuple(y for x in kept for y in (x, *behind.get(x.name, ())))


@functools.cache
def tensor_names(op: str) -> tuple[str, ...]:
    """The names of the tensor arguments, in the order of the schema."""
    return tuple(x.name for x in arguments(op) if x.is_tensor)


def backward_arguments(op: str) -> tuple[Argument, ...]:
    """The arguments of `op` that its backward takes as well."""
    return tuple(x for x in arguments(op) if x.in_backward)


def defaults(op: str) -> dict[str, Any]:
    """Argument name -> default value; `dataclasses.MISSING` if the argument is required."""
    return {x.name: x.default for x in arguments(op)}


@functools.cache
def option_names(op: str) -> tuple[str, ...]:
    """The arguments that are passed by name only."""
    return tuple(x.name for x in arguments(op) if x.keyword_only)


def per_sequence_tensors() -> dict[str, int]:
    """Name -> number of dimensions with which the tensor has one entry per sequence. The entries
    are then in its first dimension; with fewer dimensions it is shared by all sequences.
    """
    return {x.name: x.per_sequence for x in arguments("blocksparse") if x.per_sequence}


@functools.cache
def sizes_of_tensors() -> dict[str, str]:
    """Name -> the number that a tensor's first dimension follows from: total_q, total_k, batch."""
    found = {
        x.name: re.match(r"`\((total_q|total_k|batch)\b", x.shape)
        for x in arguments("flash_varlen")
    }
    return {name: match[1] for name, match in found.items() if match is not None}


@functools.cache
def per_token_tensors(op: str) -> frozenset[str]:
    """The tensors with a row for each query token."""
    return frozenset(x.name for x in arguments(op) if x.shape.startswith("`(total_q,"))


def is_int4(stored: Tensor) -> bool:
    """Whether a byte of keys or values holds two numbers."""
    return stored.dtype == torch.uint8


def numbers_of(stored: Tensor) -> int:
    """The numbers of a row of keys or values."""
    return stored.shape[-1] * (2 if is_int4(stored) else 1)


def is_by_token(descale: Any, batch: int) -> bool:
    """Whether a k_descale or v_descale of a valid call has a scale for each token and head."""
    if descale is None or descale.ndim < 2:
        return False
    return descale.ndim >= 3 or descale.shape[0] != batch


def is_by_column(descale: Any, stored: Any) -> bool:
    """Whether the v_descale of a valid call has scales for the columns of each token and head.

    stored: k or v
    """
    return descale is not None and descale.ndim == stored.ndim


def key_lengths(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None
) -> Tensor:
    """The number of keys Lk of each sequence, int32 `(batch,)`: `seqused_k` if it is given, else
    the differences of `cu_seqlens_k`, else those of `cu_seqlens_q`.
    """
    if seqused_k is not None:
        return seqused_k
    return (cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k).diff()


def fill_hints(
    q: Tensor,
    k: Tensor,
    block_table: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[int, int]:
    """`max_seqlen_q` and `max_seqlen_k`, upper bounds from shapes if they are None. No tensor value
    is read. Both are 0 if q, k or block_table is malformed, which the operator then reports.
    """
    try:
        if max_seqlen_q is None:
            max_seqlen_q = q.shape[0]
        if max_seqlen_k is None:
            max_seqlen_k = k.shape[0] if block_table is None else block_table.shape[-1] * k.shape[2]
    except (AttributeError, IndexError):
        return 0, 0
    return max_seqlen_q, max_seqlen_k
