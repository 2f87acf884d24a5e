"""The input tensors of a `Problem`: the same every time, with NaN wherever no kernel may read.

Cache slots without a key, padding rows and bias columns past Lk are NaN; block_table entries past a
sequence's pages are invalid page ids. A kernel that uses any of these returns NaN or crashes.
"""

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

import torch_paged_attn
from torch_paged_attn import backward_call, reference
from torch_paged_attn.attention_call import (
    LATENT_COLUMNS,
    is_by_token,
    option_names,
    per_sequence_tensors,
    per_token_tensors,
)
from torch_paged_attn.backward_call import GRADIENTS
from torch_paged_attn.reference.attention import FLOAT8, to_storage
from torch_paged_attn.testing.accuracy import Truth
from torch_paged_attn.testing.gradients import Gradients
from torch_paged_attn.testing.problem import Problem, optional_tensors
from torch_paged_attn.testing.selected_inputs import selected_lists

NAN = float("nan")
INVALID_PAGES = (-1, 2**31 - 1, -(2**31))
# what 1 in a cache of integers stands for, about: int8, and int4 in uint8
UNITS = {torch.int8: 1 / 30, torch.uint8: 1 / 2.5}
# values of `Problem.descale`: scales of each token
BY_TOKEN = ("tokens", "columns")


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: an operator's name, and its arguments by name."""

    op: str
    args: dict[str, Any]

    def run(self, **changes: Any) -> tuple[Tensor, ...]:
        """The operator's results, on the device of the tensors. `changes` replace arguments."""
        return getattr(torch_paged_attn, self.op)(**{**self.args, **changes})

    def truth(self, cuts_off: bool = False) -> Truth:
        """What the results are judged by, computed on the CPU. `cuts_off` is explained at
        `Truth.of`; it has no effect unless q and k are float8.
        """
        is_float8 = all(self.args[name].dtype in FLOAT8 for name in ("q", "k"))
        cuts_off = cuts_off and is_float8
        return Truth.of(getattr(reference, self.op), cuts_off=cuts_off, **self.args)

    def needs(self, *names: str) -> "Call":
        """The same call with inputs that require grad: those of these names, or all that can."""
        inputs = names or tuple(GRADIENTS.values())
        args = dict(self.args)
        for name in inputs:
            if isinstance(x := args.get(name), Tensor) and x.is_floating_point():
                args[name] = x.detach().requires_grad_()
        return dataclasses.replace(self, args=args)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, softmax_lse: Tensor, **changes: Any
    ) -> "Call":
        """The call of the backward operator, if the forward returned `out` and `softmax_lse`."""
        op = f"{self.op}_backward"
        given = self.args | {"dout": dout, "dlse": dlse, "out": out, "softmax_lse": softmax_lse}
        taken = {x.name for x in backward_call.arguments(op)}
        return Call(op, {n: x for n, x in (given | changes).items() if n in taken})

    def gradients(self, dout: Tensor, dlse: Tensor | None) -> Gradients:
        """What the backward's results are judged by, computed on the CPU."""
        return Gradients.by_reference(self.op, self.args, dout, dlse)

    def alone(self, b: int) -> "Call":
        """Sequence `b` of this call as a batch of one, with the same caches."""
        args = dict(self.args)
        batch = len(args["cu_seqlens_q"]) - 1
        first, last = args["cu_seqlens_q"][b : b + 2].tolist()
        args["cu_seqlens_q"] = cumulative([last - first])
        if args.get("attn_bias") is not None:
            args["attn_bias"] = args["attn_bias"][:, first:last]
        for name in per_token_tensors(self.op) & args.keys():
            if args[name] is not None:
                args[name] = args[name][first:last]
        k_bounds = args.get("cu_seqlens_k")
        is_packed = args["k"].dim() == 3
        if is_packed and args.get("k_start") is None:
            start, stop = (self.args["cu_seqlens_q"] if k_bounds is None else k_bounds)[
                b : b + 2
            ].tolist()
            for name in ("k", "v", "k_descale", "v_descale"):
                x: Any = self.args.get(name)
                if x is not None and (name in ("k", "v") or is_by_token(x, batch)):
                    args[name] = x[start:stop]
                    if stop - start == 1 and is_by_token(self.args.get("k_descale"), batch):
                        # a scale for one token would be that of one sequence: a row of no key
                        args[name] = args[name].expand(2, *x.shape[1:])
        if k_bounds is not None:
            args["cu_seqlens_k"] = cumulative([int(k_bounds[b + 1] - k_bounds[b])])
        for name, dims in per_sequence_tensors().items():
            x = self.args.get(name)
            is_own = x is not None and x.dim() == dims
            if is_own and not (name.endswith("_descale") and is_by_token(x, batch)):
                args[name] = x[b : b + 1]
        return dataclasses.replace(self, args=args)

    def to(self, device: torch.device | str) -> "Call":
        """The same call with its tensors on `device`. They keep their strides, and tensors that
        share a storage share one there.
        """
        storages: dict[int, Any] = {}
        args = {name: moved(value, device, storages) for name, value in self.args.items()}
        return dataclasses.replace(self, args=args)


def moved(value: Any, device: torch.device | str, storages: dict[int, Any]) -> Any:
    """A tensor, or tuples of them, on `device` with its strides; other values as they are.

    storages: those on `device`, by the addresses here; views of one stay views of one
    """
    if isinstance(value, (tuple, list)):
        return tuple(moved(x, device, storages) for x in value)
    if not isinstance(value, Tensor) or torch.device(device).type == "cpu":
        return value
    storage = value.untyped_storage()
    if storage.data_ptr() not in storages:
        # by bytes: views of one storage may have several dtypes, as a row and its scale have
        stored = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
        storages[storage.data_ptr()] = stored.to(device).untyped_storage()
    base = value.new_empty(0, device=device).set_(storages[storage.data_ptr()])
    return base.as_strided(value.shape, value.stride(), value.storage_offset())


def hostile_gradients(
    call: Call, out: Tensor, softmax_lse: Tensor, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Random gradients of a call's results, `(dout, dlse)`, with NaN in padding rows and in rows
    that see no key.
    """
    g = torch.Generator().manual_seed(seed)
    dout, dlse = _randn(g, *out.shape), _randn(g, *softmax_lse.shape)
    unseen = softmax_lse.cpu() == float("-inf")
    unseen[:, int(call.args["cu_seqlens_q"][-1]) :] = True
    dout = dout.masked_fill(unseen.mT[..., None], NAN)
    return dout.to(out.dtype), dlse.masked_fill(unseen, NAN)


def cumulative(lengths: list[int]) -> Tensor:
    """`[2, 3]` as int32 `[0, 2, 5]`."""
    bounds = torch.tensor([0, *lengths], dtype=torch.int32, device="cpu")
    return bounds.cumsum(0, dtype=torch.int32)


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _store(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in a cache's dtype. For integers it is first scaled to their range, and NaN becomes the
    largest.
    """
    if dtype in UNITS:
        x = torch.where(x.isnan(), 127.0, x / UNITS[dtype])
    return to_storage(x, dtype)


def build(problem: Problem) -> Call:
    """The call of a problem, with tensors on the CPU, whatever torch's default device is."""
    with torch.device("cpu"):
        return _build(problem)


def _build(problem: Problem) -> Call:
    g = torch.Generator().manual_seed(problem.seed)
    head_dim_v = problem.head_dim_v or problem.head_dim
    total_q = sum(problem.query_lens) + problem.padding_rows
    args: dict[str, Any] = {}

    q = _randn(g, total_q, problem.num_heads, problem.head_dim)
    q[sum(problem.query_lens) :] = NAN
    if problem.fused_qkv:  # q is a slice of a wider projection
        wide = torch.full((total_q, problem.num_heads + 3, problem.head_dim + 5), NAN)
        q = wide[:, 1:-2, 2:-3].copy_(q)
    args["q"] = q.to(problem.dtype) if not problem.fused_qkv else _cast_strided(q, problem.dtype)

    keys = (
        _packed(problem, g, head_dim_v)
        if problem.page_size is None
        else _paged(problem, g, head_dim_v)
    )
    args |= keys
    if problem.layout is not None:
        args |= _layout(problem, g)
    if problem.selected is not None:
        args |= selected_lists(problem, total_q, args.get("block_table"))
        if problem.selected.slots:
            del args["block_table"], args["seqused_k"]
    args["cu_seqlens_q"] = cumulative(problem.query_lens)
    args |= _options(problem, g, total_q)
    args |= optional_tensors(problem, total_q)
    return Call(problem.op, args)


def _cast_strided(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast without making the result contiguous."""
    base = torch.empty(x.shape[0], x.shape[1] + 3, x.shape[2] + 5).to(dtype)
    return base[:, 1:-2, 2:-3].copy_(x)


def _packed(problem: Problem, g: torch.Generator, head_dim_v: int) -> dict[str, Any]:
    # with seqused_k each sequence has rows after its keys that hold no key
    slack = 3 if problem.lengths == "seqused_k" or problem.k_ranges else 0
    spans = [n + slack for n in problem.key_lens]
    bounds = cumulative(spans)
    starts = bounds.tolist()[:-1]
    if problem.k_ranges == "apart":  # sequences in reverse order
        starts = [sum(spans) - start - n for start, n in zip(starts, spans, strict=True)]
    elif problem.k_ranges == "shared":
        starts = [start // 3 for start in starts]
    written = torch.zeros(sum(spans), dtype=torch.bool)
    for start, n in zip(starts, problem.key_lens, strict=True):
        written[start : start + n] = True
    args: dict[str, Any] = {}
    for name, dim in (("k", problem.head_dim), ("v", head_dim_v)):
        x = _randn(g, sum(spans), problem.num_kv_heads, dim)
        x = x.masked_fill(~written[:, None, None], NAN)
        args[name] = _store(x, _stored_dtype(problem, name))
    if problem.cache_layout == "mla":  # the values are the first head_dim_v of the keys
        args["v"] = _first_columns(args["k"], head_dim_v)
    if problem.descale in BY_TOKEN:
        args |= _token_scales(problem, (len(written),), (written.nonzero()[:, 0],))
    if problem.k_ranges:
        args["k_start"] = torch.tensor(starts, dtype=torch.int32)
        if problem.lengths == "cu_seqlens_k":
            args["cu_seqlens_k"] = cumulative(problem.key_lens)
    elif problem.lengths != "none":
        args["cu_seqlens_k"] = bounds
    if problem.lengths == "seqused_k":
        args["seqused_k"] = torch.tensor(problem.key_lens, dtype=torch.int32)
    return args


def _first_columns(stored: Tensor, count: int) -> Tensor:
    """The first numbers of each row."""
    return stored[..., : count // (2 if stored.dtype == torch.uint8 else 1)]


def _token_scales(
    problem: Problem, shape: tuple[int, ...], places: tuple[Tensor, ...]
) -> dict[str, Any]:
    """k_descale and v_descale by token, NaN but for the tokens at `places` in a cache of `shape`
    (pages and slots, or rows). They have a generator of their own, so that they do not change the
    other tensors.
    """
    g = torch.Generator().manual_seed(problem.seed + 2)
    found = {}
    more: tuple[int, ...] = ()
    if problem.descale == "columns":
        more = ((problem.head_dim_v or problem.head_dim) // LATENT_COLUMNS,)
    for name in ("k", "v") if problem.descale == "tokens" else ("v",):
        unit = UNITS.get(_stored_dtype(problem, name), 1.0)
        scales = torch.full((*shape, problem.num_kv_heads, *more), NAN)
        tokens = torch.rand(len(places[0]), problem.num_kv_heads, *more, generator=g)
        scales[places] = (0.5 + tokens) * unit
        # (num_pages, num_kv_heads, page_size), or (total_k, num_kv_heads)
        found[f"{name}_descale"] = scales.movedim(len(shape), 1).contiguous()
    return found


def _in_rows(args: dict[str, Any]) -> dict[str, Any]:
    """The same pages and scales, those of each token and head behind one another."""
    rows = args["k"].transpose(1, 2)  # (num_pages, page_size, num_kv_heads, ...)
    # with scales by column as vLLM has them: latents, their scales, rope
    order = ("k", "k_descale", "v", "v_descale") if "k_descale" in args else ("v", "v_descale", "k")
    parts = [args[name].transpose(1, 2) for name in order]
    sizes = [4 if x.dtype == torch.float32 and x.dim() == 3 else x[0, 0, 0].nbytes for x in parts]
    widths = [-(-size // 4) * 4 for size in sizes]
    memory = torch.full((*rows.shape[:3], sum(widths)), 0xFF, dtype=torch.uint8)
    found, at = dict(args), 0
    for name, x, size, width in zip(order, parts, sizes, widths, strict=True):
        view = memory[..., at : at + size].view(x.dtype)
        view = view[..., 0] if x.dim() == 3 else view
        found[name] = view.copy_(x).transpose(1, 2)
        at += width
    return found


def _stored_dtype(problem: Problem, name: str) -> torch.dtype:
    stored = problem.kv_dtype or problem.dtype
    return (problem.v_dtype or stored) if name == "v" else stored


def _paged(problem: Problem, g: torch.Generator, head_dim_v: int) -> dict[str, Any]:
    page_size, heads, dim = problem.page_size, problem.num_kv_heads, problem.head_dim
    assert page_size is not None
    counts = [-(-n // page_size) for n in problem.key_lens]
    num_pages = max(1, sum(counts) + problem.spare_pages)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(problem.page_seed))

    if problem.cache_layout == "mla":  # the values are the first head_dim_v of the keys
        k = torch.full((num_pages, heads, page_size, dim), NAN)
        v = k[..., :head_dim_v]
    elif problem.cache_layout == "packed_last":
        both = torch.full((num_pages, heads, page_size, dim + head_dim_v), NAN)
        k, v = both.split([dim, head_dim_v], -1)
    elif problem.cache_layout == "interleaved":  # pages of k and v by turns in one storage
        both = torch.full((num_pages, 2, page_size, heads, max(dim, head_dim_v)), NAN)
        k, v = (both[:, i].transpose(1, 2)[..., :n] for i, n in ((0, dim), (1, head_dim_v)))
    elif problem.cache_layout == "nhd":
        k, v = (
            torch.full((num_pages, page_size, heads, n), NAN).transpose(1, 2)
            for n in (dim, head_dim_v)
        )
    else:
        k, v = (torch.full((num_pages, heads, page_size, n), NAN) for n in (dim, head_dim_v))

    width = max(counts, default=0) + 2
    which = torch.arange(len(counts) * width) % len(INVALID_PAGES)
    table = torch.tensor(INVALID_PAGES, dtype=torch.int32)[which].view(len(counts), width)
    next_page, places = 0, []
    for b, (count, n) in enumerate(zip(counts, problem.key_lens, strict=True)):
        table[b, :count] = order[next_page : next_page + count]
        next_page += count
        page, offset = table[b].long()[torch.arange(n) // page_size], torch.arange(n) % page_size
        places.append(torch.stack([page, offset]))
        k[page, :, offset] = _randn(g, n, heads, dim)
        if problem.cache_layout != "mla":
            v[page, :, offset] = _randn(g, n, heads, head_dim_v)

    args: dict[str, Any] = {
        name: _store_view(x, _stored_dtype(problem, name)) for name, x in (("k", k), ("v", v))
    }
    if problem.cache_layout == "mla":
        args["v"] = _first_columns(args["k"], head_dim_v)
    if problem.descale in BY_TOKEN:
        slots = torch.cat([torch.zeros(2, 0, dtype=torch.int64), *places], 1)
        args |= _token_scales(problem, (num_pages, page_size), tuple(slots))
        if problem.cache_layout == "nhd":
            for name in {"k_descale", "v_descale"} & set(args):
                args[name] = args[name].transpose(1, 2).contiguous().transpose(1, 2)
        elif problem.cache_layout == "rows":
            args = _in_rows(args)
    args["block_table"] = table
    if problem.lengths == "cu_seqlens_k":
        args["cu_seqlens_k"] = cumulative(problem.key_lens)
    else:
        args["seqused_k"] = torch.tensor(problem.key_lens, dtype=torch.int32)
    return args


def _store_view(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`_store`, with a result that has the strides of `x`, or half of them if two numbers share a
    byte.
    """
    stored = _store(x, dtype)
    strides = x.stride()
    if dtype == torch.uint8:
        strides = *(s // 2 for s in strides[:-1]), 1
    span = 1 + sum((n - 1) * s for n, s in zip(stored.shape, strides, strict=True))
    return stored.new_empty(span).as_strided(stored.shape, strides).copy_(stored)


def _layout(problem: Problem, g: torch.Generator) -> dict[str, Any]:
    layout = problem.layout
    assert layout is not None
    queries, keys = _last_positions(problem)
    rows, cols = queries // layout.q_block_size + 1, keys // layout.k_block_size + 2
    heads = {"one": 1, "kv": problem.num_kv_heads, "all": problem.num_heads}[layout.heads]
    outer = (len(problem.seqs), heads) if layout.batched else (heads,)
    listed = torch.rand(*outer, rows, cols, generator=g) < layout.density
    counts = listed.sum(-1)
    crow = torch.nn.functional.pad(counts.cumsum(-1), (1, 0)).to(torch.int32)
    # the columns of each layout row are in random order
    nnz = int(crow[..., -1].max()) if crow.numel() else 0
    col = torch.full((*outer, nnz), INVALID_PAGES[1], dtype=torch.int32)
    for where in itertools.product(*(range(n) for n in outer)):
        rows_of = (row.nonzero()[:, 0] for row in listed[where])
        flat = torch.cat([r[torch.randperm(r.numel(), generator=g)] for r in rows_of])
        col[where][: flat.numel()] = flat.to(torch.int32)
    return {
        "crow_indices": crow,
        "col_indices": col,
        "q_block_size": layout.q_block_size,
        "k_block_size": layout.k_block_size,
    }


def _last_positions(problem: Problem) -> tuple[int, int]:
    """The largest position of a query, and of a key; at least 0."""
    firsts = problem.q_positions or [context for _, context in problem.seqs]
    queries = [p + n - 1 for p, n in zip(firsts, problem.query_lens, strict=True)]
    last, run = max([*problem.key_lens, 1]) - 1, problem.key_interleave
    runs = last // run * problem.key_ranks + problem.key_rank
    return max([*queries, 0]), runs * run + last % run


def _options(problem: Problem, g: torch.Generator, total_q: int) -> dict[str, Any]:
    batch, heads, kv_heads = len(problem.seqs), problem.num_heads, problem.num_kv_heads
    names = option_names("flash_varlen")
    if problem.selected is not None:
        names = tuple(n for n in option_names("selected_attention") if n in names)
    args: dict[str, Any] = {name: getattr(problem, name) for name in names}
    if problem.alibi:
        slopes = (batch, heads) if problem.alibi == "batch" else (heads,)
        args["alibi_slopes"] = torch.rand(slopes, generator=g)
    if problem.bias:
        columns = max(problem.key_lens, default=0)
        bias = _randn(g, heads if problem.bias_heads == "all" else 1, total_q, columns + 2)
        if problem.bias == "bool":
            bias = bias > -0.5
        else:
            bias = bias.masked_fill(bias < -1.5, float("-inf")).to(_bias_dtype(problem))
            row = 0
            for query_len, key_len in zip(problem.query_lens, problem.key_lens, strict=True):
                bias[:, row : row + query_len, key_len:] = NAN
                row += query_len
        args["attn_bias"] = bias
    if problem.sinks:
        args["sinks"] = _randn(g, heads)
    shapes = {"scalar": (), "heads": (kv_heads,), "batch": (batch, kv_heads)}
    if problem.descale:
        shape = shapes.get(problem.descale, (kv_heads,))
        for name in ("k_descale", "v_descale") if problem.descale not in BY_TOKEN else ():
            unit = UNITS.get(_stored_dtype(problem, name[0]), 1.0)
            args[name] = (0.5 + torch.rand(shape, generator=g)) * unit
        if problem.dtype.itemsize == 1:
            args["q_descale"] = 0.5 + torch.rand(shape, generator=g)
    if problem.out_scale:
        args["out_scale"] = torch.tensor(0.01)
    if problem.dropout_p > 0.0:
        base = problem.dropout_base or ()
        args["rng_state"] = torch.tensor([problem.seed - 2**40, 2**35 + 7, *base])
    return args


def _bias_dtype(problem: Problem) -> torch.dtype:
    return problem.dtype if problem.dtype.itemsize > 1 else torch.float32
