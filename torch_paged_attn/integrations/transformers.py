"""An attention implementation for Hugging Face Transformers: encoders, `generate`, packed rows and
`generate_batch`.

    from torch_paged_attn.integrations import transformers as paged

    paged.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=paged.NAME)
    paged.use(model)  # for model.generate_batch

`register` adds names to Transformers' two public registries, AttentionInterface and
AttentionMaskInterface. Causal and windowed attention, padding, packed rows and cross attention to
padded encoders need no (queries, keys) mask. Other patterns have one, as with SDPA: chunks
(Llama 4), images that see themselves (Gemma 3), a caller's own mask function. Softcap and sinks are
always supported.

Under continuous batching, full-attention layers use Transformers' own pages: new keys and values
are written by slot, and attention reads them through a block table. Sliding-window layers keep
Transformers' ring buffer, which Transformers gathers. The host reads tensors only where
Transformers' flash-attention path does so, too, and once for all layers: padding masks, and the
positions of a row that may be packed. Works with Transformers 5.17 to 5.24.
"""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.integrations._constants import multiples, repeated
from torch_paged_attn.integrations._dropout import drawn_rng_state
from torch_paged_attn.integrations._transformers_batching import continuous, keep_pages, rows
from torch_paged_attn.integrations._transformers_dense import (
    attend_dense,
    attend_rows,
    attend_short,
    attend_step,
)
from torch_paged_attn.integrations._transformers_keywords import (
    IGNORED,
    refuse_unknown,
    with_sinks,
)
from torch_paged_attn.integrations._transformers_masks import make_mask
from torch_paged_attn.integrations._transformers_selected import (
    KeyLists,
    Shown,
    attend_listed,
    listed_mask,
    refuse_lists,
)
from torch_paged_attn.integrations._transformers_short import short_form
from torch_paged_attn.integrations._versions import require
from torch_paged_attn.ops import flash_varlen

__all__ = ["BATCH_NAME", "IGNORED", "NAME", "attention_forward", "make_mask", "register", "use"]

NAME = "torch_paged_attn"

# After 5.17 `generate_batch` refuses a name without "flash" in it, and `set_attn_implementation`
# looks for a name with it on the kernel hub: models load by NAME, and `use` puts this in the config
BATCH_NAME = "torch_paged_attn_flash"


def register() -> None:
    """Make NAME an `attn_implementation` for every model. A second call changes nothing.

    Raises:
        ImportError: Transformers is not installed, or too old.
    """
    require("transformers", "integrations.transformers", "integrations")
    from transformers import AttentionInterface, AttentionMaskInterface

    # 5.17 puts "paged|" before the name of a model that enters continuous batching
    for name in (NAME, f"paged|{NAME}", BATCH_NAME):
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, make_mask)
    keep_pages((NAME, f"paged|{NAME}", BATCH_NAME))


def use(model: Any) -> Any:
    """Make `model` use this attention, under continuous batching too. Returns the model."""
    from transformers import AttentionInterface

    register()
    if "paged|sdpa" in AttentionInterface().valid_keys():
        model.set_attn_implementation(NAME)
    else:
        model.config._attn_implementation = BATCH_NAME
    return model


# options beside a four-dimensional mask, which says exactly which keys are seen
MASK_SAYS_ALL = {"causal": False, "window_size_left": -1, "window_size_right": -1}


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    cache: Any = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as Transformers' models call it.

    query: (batch, num_heads, Lq, head_dim)
    key, value: (batch, num_kv_heads, Lk, head_dim), all keys of the cache; under continuous
        batching the new ones
    s_aux: (num_heads,), a logit of each head that belongs to no key
    sinks: (batch, num_heads, Lq, 1), the same for each query
    indices: (batch, Lq, n) keys that a query may see, of those that the mask shows; -1 names none
    block_indices: (batch, groups of heads, Lq, n), the same of blocks of keys

    Returns (batch, Lq, num_heads, head_dim_v) and None in place of attention weights.

    Raises:
        NotImplementedError: a keyword that is not known, and not in `IGNORED`.
    """
    if kwargs:
        refuse_unknown(kwargs)
    short = short_form(attention_mask)
    # a decode step, whose host time is most of it: no loop over what is absent
    if short is not None and dropout == 0 and cache is cu_seq_lens_q is s_aux is None:
        is_plain = position_bias is indices is block_indices is sinks is None
        if is_plain and query.shape[2] == 1:
            out = attend_step(query, key, value, short, scaling, softcap or 0.0)
            if out is not None:
                return out, None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask_dim = None if attention_mask is None or short is not None else attention_mask.dim()
    if attention_mask is not None and mask_dim not in (None, 1, 2, 4):
        raise ValueError(
            "torch_paged_attn: attention_mask must have 2 or 4 dimensions in Transformers, got "
            f"shape {tuple(attention_mask.shape)}"
        )
    if sliding_window is not None and sliding_window < 1 and mask_dim != 4 and short is None:
        # in Transformers such a layer sees no key, and its result is 0; the op's window of -1 would
        # be unbounded
        batch, heads, length, _ = query.shape
        return query.new_zeros(batch, length, heads, value.shape[3]), None
    window = -1 if sliding_window is None else sliding_window - 1
    options = {
        "sinks": None if s_aux is None else s_aux.float(),
        "softmax_scale": scaling,
        "causal": causal,
        "window_size_left": window,
        "window_size_right": window,
        "softcap": softcap or 0.0,
    }
    if dropout > 0:
        # from torch's generator, whose state activation checkpointing restores
        options |= {"dropout_p": dropout, "rng_state": drawn_rng_state(query.device)}
    if indices is not None or block_indices is not None:
        refuse_lists(cache, cu_seq_lens_q, attention_mask)
        lists = KeyLists.of(module, indices, block_indices)
        mask = attention_mask if short is None else short
        shown = Shown.of(mask, query.shape[2], key.shape[2], options)
        out = None
        if position_bias is None and sinks is None:
            out = attend_listed(lists, shown, query, key, value, options)
        if out is not None:
            return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None
        attention_mask = listed_mask(lists, shown, query, key)
        short, mask_dim = None, 4
    if position_bias is not None or sinks is not None:
        is_packed = mask_dim == 1 or (short is not None and short.cu_seqlens is not None)
        if is_packed or cu_seq_lens_q is not None or cache is not None:
            raise NotImplementedError(
                "torch_paged_attn: position_bias is not supported with packed rows: use rows of one"
                " sequence each, without generate_batch"
            )
        mask = attention_mask if short is None else short.full()
        out = _biased(query, key, value, mask, position_bias, sinks, options)
    elif cache is not None:
        out = continuous(
            module.layer_idx,
            query,
            key,
            value,
            cu_seq_lens_q,
            cu_seq_lens_k,
            cache,
            kwargs,
            options,
        )
    elif short is not None:
        cu_seqlens = cu_seq_lens_q
        if short.keys is not None:
            cu_seqlens = None
        elif cu_seqlens is None and short.causal and short.cu_seqlens is None:
            cu_seqlens = short.once(lambda: _packed_row(query, key, position_ids))
        if cu_seqlens is not None:
            windows = {"window_size_left": short.window, "window_size_right": short.window}
            options = options | windows | {"causal": short.causal}
            out = _packed(query, key, value, cu_seqlens, cu_seq_lens_k, options)
        else:
            out = attend_short(query, key, value, short, options)
    elif cu_seq_lens_q is not None and attention_mask is not None and _shows_all(attention_mask):
        options = options | MASK_SAYS_ALL
        out = _packed(query, key, value, cu_seq_lens_q, cu_seq_lens_k, options)
    elif attention_mask is not None and mask_dim == 4:
        if cu_seq_lens_q is not None and not options["causal"]:  # a causal mask has them in it
            raise NotImplementedError(
                "torch_paged_attn: cu_seq_lens_q is not supported with a mask of keys, which knows"
                " no sequences: use packed rows of encoders that flash-attn can serve, without"
                " padding"
            )
        out = _masked(query, key, value, attention_mask, options)
    elif attention_mask is not None and mask_dim == 2:
        return _padded(query, key, value, attention_mask, options), None
    elif cu_seq_lens_q is not None:
        out = _packed(query, key, value, cu_seq_lens_q, cu_seq_lens_k, options)
    elif attention_mask is not None:
        out = _packed(query, key, value, attention_mask, None, options)
    elif (cu_seqlens := _packed_row(query, key, position_ids)) is not None:
        out = _packed(query, key, value, cu_seqlens, None, options)
    else:
        out = _dense(query, key, value, options)
    return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None


def _cu_seqlens(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _packed_row(query: Tensor, key: Tensor, position_ids: Tensor | None) -> Tensor | None:
    """cu_seqlens of a packed row, that is one whose positions restart; None for other rows.

    For models that do not pass their positions to `make_mask`, but to the layer.
    """
    batch, _, length, _ = query.shape
    if position_ids is None or position_ids.dim() != 2:
        return None
    if batch > 1 or length == 1 or length != key.shape[2]:
        return None
    starts = 1 + (position_ids[0].diff() != 1).nonzero().flatten()
    # a compiler does not know the length of `starts`; there, one sequence is a packed row as well
    if not torch.compiler.is_compiling() and not len(starts):
        return None
    return torch.nn.functional.pad(torch.cat([starts, starts.new_full((1,), length)]), (1, 0)).int()


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    cu_seqlens_q = cu_seqlens_q.int()
    cu_seqlens_k = None if cu_seqlens_k is None else cu_seqlens_k.int()
    q, k, v = rows(query), rows(key), rows(value)
    return flash_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)[0]


def _dense(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """Sequences of one length without padding."""
    return attend_dense(query, key, value, key.shape[2], options)


def _shows_all(attention_mask: Tensor) -> bool:
    """Whether it is the mask by which `make_mask` shows every key of a row to every query."""
    return attention_mask.dtype == torch.bool and attention_mask.shape == (1, 1, 1, 1)


def _masked(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attention to exactly the keys of a four-dimensional mask, bool or added to the logits."""
    options = options | MASK_SAYS_ALL
    batch, _, query_len, _ = query.shape
    if _shows_all(attention_mask):
        return _dense(query, key, value, options)
    by_key = attention_mask.dtype == torch.bool and attention_mask.shape[1:3] == (1, 1)
    if by_key and query_len > 1 and not torch.compiler.is_compiling():
        keys = attention_mask[:, 0, 0].expand(batch, -1)
        k, v = (x.transpose(1, 2)[:, : keys.shape[1]][keys] for x in (key, value))
        cu_seqlens_k = _cu_seqlens(keys.sum(1))
        cu_seqlens_q = multiples(query_len, batch, query)
        return flash_varlen(rows(query), k, v, cu_seqlens_q, cu_seqlens_k, **options)[0]
    return _over_pairs(query, key, value, attention_mask, options)


def _biased(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None,
    sinks: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Attention with `position_bias` (batch or 1, num_heads or 1, Lq, Lk), which may be learned,
    a sink of each query, (batch, num_heads, Lq, 1), and a mask of `make_mask`.
    """
    hidden = float("-inf")
    query_len, key_len = query.shape[2], key.shape[2]
    if sinks is not None and attention_mask is None and options["causal"]:
        seen = torch.ones(query_len, key_len, dtype=torch.bool, device=key.device)
        attention_mask = seen.tril(key_len - query_len)[None, None]
    if position_bias is None:
        position_bias = query.new_zeros(1, 1, query_len, key_len)
    if attention_mask is None:
        bias = position_bias
    elif attention_mask.dim() == 2:  # a static cache is longer than its written part
        keys = attention_mask[:, None, None].bool()
        length = keys.shape[3]
        key, value = key[:, :, :length], value[:, :, :length]
        bias = position_bias[..., :length].masked_fill(~keys, hidden)
    else:
        options = options | MASK_SAYS_ALL
        if attention_mask.dtype == torch.bool:
            bias = torch.where(attention_mask, position_bias, hidden)
        else:
            bias = position_bias + attention_mask
    if sinks is not None:
        key, value, bias = with_sinks(key, value, bias, sinks)
        options = options | MASK_SAYS_ALL
    return _over_pairs(query, key, value, bias, options)


def _over_pairs(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attention with a mask or bias for each pair of query and key."""
    batch, _, query_len, _ = query.shape
    bias = attention_mask.expand(batch, -1, query_len, -1).transpose(0, 1).flatten(1, 2)
    options = options | {"attn_bias": bias}
    if query_len == key.shape[2]:
        bounds = multiples(query_len, batch, query)
        return _packed(query, key, value, bounds, None, options)
    if attention_mask.dtype == torch.bool:  # the rest of a static cache is not written yet
        positions = torch.arange(1, 1 + bias.shape[2], dtype=torch.int32, device=key.device)
        lengths = (attention_mask.expand(batch, -1, -1, -1) * positions).amax((1, 2, 3)).int()
    else:
        lengths = repeated(bias.shape[2], batch, key)
    return attend_rows(query, key, value, lengths, options)


def _padded(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attention of the tokens that are no padding. The mask is (batch, keys), and its last columns
    are the queries.
    """
    query_len = query.shape[2]
    keys = attention_mask.bool()
    queries = keys[:, -query_len:]
    q = query.transpose(1, 2)
    # a static cache is longer than its written part
    k, v = (x.transpose(1, 2)[:, : keys.shape[1]] for x in (key, value))
    packed, _ = flash_varlen(
        q[queries],
        k[keys],
        v[keys],
        _cu_seqlens(queries.sum(1)),
        _cu_seqlens(keys.sum(1)),
        **options,
    )
    out = packed.new_zeros(*q.shape[:3], v.shape[3])  # under autocast of packed's type
    out[queries] = packed
    return out
