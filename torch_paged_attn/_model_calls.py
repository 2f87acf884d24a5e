"""The calls of attention that a model makes, by use: what `compile` compiles kernels for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torch_paged_attn import _warmup
from torch_paged_attn._model_config import KeyLists, Layer
from torch_paged_attn._serving import Serving
from torch_paged_attn.ops import flash_varlen, select_keys, selected_attention
from torch_paged_attn.ops.append_and_attend import append_and_attend

USES = "serving", "generate", "training"
# queries of a sequence, beside one: draft tokens, and prompts
QUERIES = (1, 2, 4, 16, 64, 100, 300, 512, 1100, 2048, 4096, 8192)

# pairs of a mask that calls are made with: larger ones take the same kernels
MOST_PAIRS = 1 << 30

Call = Callable[[], Any]
# a description, and the function that makes the calls on a device
Described = tuple[str, Callable[[torch.device], Any]]


class Sizes(NamedTuple):
    """What a user says of how a model runs."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    max_batch: int
    max_tokens: int
    max_length: int


def jobs_of(layer: Layer, use: str, sizes: Sizes) -> Iterator[Described]:
    """The calls of a layer, in parts that are compiled one after the other."""
    if layer.mask and use == "training":
        plain = layer._replace(window=-1, lists=None)  # the mask says what they do
        train = functools.partial(masked_training_calls, plain, sizes)
        yield f"masked training {plain} {sizes}", train
    if layer.lists is not None:
        if use == "training":
            train = functools.partial(selected_training_calls, layer, sizes)
            yield f"selected training {layer} {sizes}", train
        else:
            yield f"selected {layer} {sizes}", functools.partial(selected_calls, layer, sizes)
    if layer.is_latent:
        if use != "training":
            make = functools.partial(latent_calls, layer, sizes)
            yield f"latent {layer} {sizes}", make
    elif layer.lists is not None:
        return  # a layer without lists has the other calls of the model
    elif use == "training":
        layer = layer._replace(mask="")
        # Transformers' rows that are no longer than a window are called without it
        for window in dict.fromkeys((layer.window, -1)):
            of = layer._replace(window=window)
            yield f"training {of} {sizes}", functools.partial(training_calls, of, sizes)
    elif layer.head_dim != layer.head_dim_v:  # MLA's prefill
        yield _warmup_of(layer, sizes, None)
    elif use == "serving":
        serving = serving_of(layer, sizes)
        yield repr(serving), serving.calls
    else:
        yield _warmup_of(layer, sizes, sizes.page_size)
        yield _warmup_of(layer, sizes, None)
        yield f"generate {layer} {sizes}", functools.partial(generate_calls, layer, sizes)


def serving_of(layer: Layer, sizes: Sizes) -> Serving:
    """The calls of an engine's steps, as vLLM's plugin describes them."""
    return Serving(
        *(layer.num_heads, layer.num_kv_heads, layer.head_dim, sizes.dtype, sizes.kv_dtype),
        page_size=sizes.page_size,
        max_pages=-(-sizes.max_length // sizes.page_size),
        max_batch=sizes.max_batch,
        max_tokens=sizes.max_tokens,
        max_length=sizes.max_length,
        has_sinks=layer.has_sinks,
        has_slopes=layer.has_slopes,
        options=tuple(sorted(layer.options.items())),
    )


def _warmup_of(layer: Layer, sizes: Sizes, page_size: int | None) -> Described:
    """The calls of `warmup`."""
    options = layer.options
    if layer.window < 0 and not layer.softcap and not layer.has_sinks:
        options = {"causal": True}  # what a user writes
    kv_dtype = sizes.dtype if page_size is None else sizes.kv_dtype
    return _warmup.calls_of(
        *(layer.num_heads, layer.num_kv_heads, (layer.head_dim, layer.head_dim_v)),
        *(sizes.dtype, kv_dtype, page_size, sizes.max_batch, sizes.max_tokens, None, options),
    )


class _New:
    """Makes the tensors of a layer's calls on a device. No sequence has a query or a key."""

    def __init__(self, layer: Layer, sizes: Sizes, device: torch.device) -> None:
        self.layer, self.sizes, self.device = layer, sizes, device
        self.most_keys = max(sizes.max_length, _warmup.CONTEXTS[0])
        width = -(-self.most_keys // sizes.page_size)
        self._table = self.ints(sizes.max_batch, width)
        self._queries = self(sizes.max_tokens, layer.num_heads, layer.head_dim)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype or self.sizes.dtype, device=self.device)

    def ints(self, *shape: int) -> torch.Tensor:
        return self(*shape, dtype=torch.int32)

    def queries(self, count: int) -> torch.Tensor:
        return self._queries[:count]

    def table(self, batch: int, keys: int) -> torch.Tensor:
        """A block table with room for so many keys."""
        return self._table[:batch, : -(-keys // self.sizes.page_size)]

    def options(self) -> dict[str, Any]:
        """Arguments of `flash_varlen`, with the tensors among them."""
        found = self.layer.options
        if self.layer.has_sinks:
            found["sinks"] = self(self.layer.num_heads, dtype=torch.float32)
        if self.layer.has_slopes:
            found["alibi_slopes"] = self(self.layer.num_heads, dtype=torch.float32)
        return found

    def descales(self) -> dict[str, torch.Tensor]:
        """Those of 8-bit caches."""
        if self.sizes.kv_dtype.itemsize > 1:
            return {}
        return dict.fromkeys(("k_descale", "v_descale"), self(dtype=torch.float32))

    def shapes(self) -> Iterator[tuple[int, int, int]]:
        """Sequences, their queries, and their keys."""
        contexts = sorted({*(x for x in _warmup.CONTEXTS if x < self.most_keys), self.most_keys})
        for batch, queries in _batches(self.sizes):
            yield from ((batch, queries, keys) for keys in contexts if keys >= queries)


def _batches(sizes: Sizes) -> Iterator[tuple[int, int]]:
    """Sequences and their queries."""
    for batch, queries in itertools.product(_warmup.sizes_up_to(sizes.max_batch), QUERIES):
        if batch * queries <= sizes.max_tokens and queries <= sizes.max_length:
            yield batch, queries


def latent_calls(layer: Layer, sizes: Sizes, device: torch.device) -> list[Call]:
    """Decode and chunks over pages of latents."""
    new = _New(layer, sizes, device)
    cache = new(64, 1, sizes.page_size, layer.head_dim, dtype=sizes.kv_dtype)
    options = new.options() | new.descales()
    attend = functools.partial(flash_varlen, **options)
    latents = cache, cache[..., : layer.head_dim_v]
    calls: list[Call] = []
    for batch, queries, keys in new.shapes():
        lengths = new.ints(batch + 1), None, queries, keys, new.ints(batch), new.table(batch, keys)
        calls.append(functools.partial(attend, new.queries(batch * queries), *latents, *lengths))
    return calls


def selected_calls(layer: Layer, sizes: Sizes, device: torch.device) -> list[Call]:
    """Decode and prefill over pages, of which each token's list names units of keys; and the
    selection, where the model's is `select_keys`.
    """
    new, lists = _New(layer, sizes, device), layer.lists
    assert lists is not None
    shape = 64, layer.num_kv_heads, sizes.page_size, layer.head_dim
    k = new(*shape, dtype=sizes.kv_dtype)
    v = k[..., : layer.head_dim_v] if layer.is_latent else torch.zeros_like(k)
    options: dict[str, Any] = {"softmax_scale": layer.softmax_scale, "causal": True}
    options |= new.descales()
    attend = functools.partial(selected_attention, select_size=lists.select_size, **options)
    listed = new.ints(1, layer.num_kv_heads, lists.units)
    of_index: dict[str, Any] = {"select_size": lists.select_size, "num_units": lists.units}
    select = functools.partial(select_keys, causal=True, **of_index)
    index_k = new(64, 1, sizes.page_size, max(lists.index_dim, 1))
    calls: list[Call] = []
    for batch, queries, keys in new.shapes():
        total = batch * queries
        lengths = new.ints(batch + 1), None, queries, keys, new.ints(batch), new.table(batch, keys)
        indices = listed.expand(total, -1, -1)
        calls.append(functools.partial(attend, new.queries(total), k, v, indices, *lengths))
        if lists.index_heads:
            q = new(total, lists.index_heads, lists.index_dim)
            weights = new(total, lists.index_heads, dtype=torch.float32)
            calls.append(functools.partial(select, q, index_k, weights, *lengths))
    return calls


def selected_calls_of(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    options: dict[str, Any],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    max_batch: int,
    max_tokens: int,
    num_units: int,
    select_size: int,
) -> Described:
    """`selected_calls` of the arguments of `warmup`."""
    layer = Layer(
        *(num_heads, num_kv_heads, head_dim, head_dim_v),
        options.get("softmax_scale") or head_dim**-0.5,
        is_latent=num_kv_heads == 1 and head_dim_v < head_dim,
        lists=KeyLists(num_units, select_size),
    )
    sizes = Sizes(dtype, kv_dtype, page_size, max_batch, max_tokens, _warmup.CONTEXTS[-1])
    return f"selected {layer} {sizes}", functools.partial(selected_calls, layer, sizes)


def generate_calls(layer: Layer, sizes: Sizes, device: torch.device) -> list[Call]:
    """What `warmup` does not call: keys in dense caches, as those of Transformers' `generate`, and
    flash-attn's functions.
    """
    from torch_paged_attn.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache

    new = _New(layer, sizes, device)
    options, shape = new.options(), (layer.num_kv_heads, layer.head_dim)
    attend = functools.partial(flash_varlen, **options)
    packed, pages = new(64, *shape), new(2, 64, sizes.page_size, *shape, dtype=sizes.kv_dtype)
    paged = {n: x for n, x in options.items() if n != "alibi_slopes"} | new.descales()
    has_names = not layer.has_sinks and not layer.has_slopes  # in flash-attn's functions
    named = {n: options[n] for n in ("softmax_scale", "softcap", "causal")}
    named["window_size"] = layer.window, layer.window
    calls: list[Call] = []
    for batch, queries, keys in new.shapes():
        q, used = new.queries(batch * queries), new.ints(batch)
        lengths = new.ints(batch + 1), None, queries, keys, used
        rows = q.view(batch, queries, *q.shape[1:])
        fresh = new(batch, queries, *shape)
        calls.append(functools.partial(attend, q, packed, packed, *lengths, k_start=used))
        if not layer.has_slopes:
            given = rows, *pages, fresh, fresh, used
            table = new.table(batch, keys)
            calls.append(functools.partial(append_and_attend, *given, table, **paged))
        if has_names and batch * keys <= sizes.max_tokens:
            dense = new(batch, keys, *shape)
            calls.append(functools.partial(flash_attn_func, rows, dense, dense, **named))
            cached = functools.partial(
                flash_attn_with_kvcache, rows, dense, dense, cache_seqlens=used, **named
            )
            calls += cached, functools.partial(cached, k=fresh, v=fresh)
    return calls


def training_calls(layer: Layer, sizes: Sizes, device: torch.device) -> list[Call]:
    """Packed sequences of the same length, forward and backward."""

    def train(batch: int, length: int, deterministic: bool) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            new = _New(layer, sizes, device)
            options = new.options() | {"deterministic": deterministic}
            q, k, v, bounds = _packed(new, batch, length)
            out, _ = flash_varlen(q, k, v, bounds, None, length, length, **options)
            out.backward(torch.empty_like(out))

    return [
        functools.partial(train, batch, length, deterministic)
        for batch, length in _batches(sizes)
        for deterministic in (True, False)
        if length > 1
    ]


def masked_training_calls(layer: Layer, sizes: Sizes, device: torch.device) -> list[Call]:
    """Forward and backward as Transformers' layers call it under a bool mask of all pairs: rows of
    one length. A single row may be a view of keys (heads, tokens, head_dim).
    """
    new = _New(layer, sizes, device)
    options = new.options() | {"causal": False, "window_size_left": -1, "window_size_right": -1}
    heads = layer.num_heads if layer.mask == "heads" else 1

    def train(batch: int, length: int, is_view: bool) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            q, k, v, bounds = _packed(new, batch, length)
            if is_view:
                k = new(layer.num_kv_heads, length, layer.head_dim).transpose(0, 1).requires_grad_()
            mask = torch.empty(heads, batch * length, length, dtype=torch.bool, device=device)
            out, _ = flash_varlen(q, k, v, bounds, None, attn_bias=mask, **options)
            out.backward(torch.empty_like(out))

    return [
        functools.partial(train, batch, length, is_view)
        for batch, length in _rows_of_masks(sizes)
        for is_view in (False, True)[: 1 + (batch == 1)]
        if heads * batch * length**2 <= MOST_PAIRS
    ]


def _rows_of_masks(sizes: Sizes) -> Iterator[tuple[int, int]]:
    """Rows and their tokens: of each number of tiles lengths that are multiples of 16, of 4, and
    odd, as kernels are compiled for what divides the strides of a mask."""
    for batch in (1 << i for i in range(sizes.max_batch.bit_length())):
        for longest in (1 << i for i in range(6, sizes.max_length.bit_length())):
            if batch * longest <= sizes.max_tokens:
                lengths = longest, longest - 4, longest - 1
                yield from ((batch, n) for n in lengths if n > longest // 2)


def _packed(new: _New, batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values that require gradients, and the bounds of their sequences."""
    layer, total = new.layer, batch * length
    q = new(total, layer.num_heads, layer.head_dim).requires_grad_()
    k = new(total, layer.num_kv_heads, layer.head_dim).requires_grad_()
    v = k[..., : layer.head_dim_v]
    if not layer.is_latent:
        v = new(total, layer.num_kv_heads, layer.head_dim_v).requires_grad_()
    bounds = torch.arange(0, total + 1, length, dtype=torch.int32, device=new.device)
    return q, k, v, bounds


def selected_training_calls(layer: Layer, sizes: Sizes, device: torch.device) -> list[Call]:
    """The same for layers with lists, with bounds of keys and without. Tokens name the first
    units."""
    lists = layer.lists
    assert lists is not None
    units = torch.arange(lists.units, dtype=torch.int32, device=device)
    options: dict[str, Any] = {
        "softmax_scale": layer.softmax_scale, "select_size": lists.select_size, "causal": True,
    }  # fmt: skip

    def train(batch: int, length: int, has_bounds: bool) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            q, k, v, bounds = _packed(_New(layer, sizes, device), batch, length)
            indices = units.expand(batch * length, layer.num_kv_heads, -1).contiguous()
            lengths = bounds, bounds if has_bounds else None, length, length
            out, _ = selected_attention(q, k, v, indices, *lengths, **options)
            out.backward(torch.empty_like(out))

    return [
        functools.partial(train, batch, length, has_bounds)
        for batch, length in _batches(sizes)
        for has_bounds in (True, False)
        if length > 1
    ]
