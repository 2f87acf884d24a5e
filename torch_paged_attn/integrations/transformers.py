"""Hugging Face Transformers on `flash_varlen`: encoders, `generate`, packed rows, `generate_batch`.

    from torch_paged_attn.integrations import transformers as paged

    paged.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=paged.NAME)
    paged.use(model)  # for model.generate_batch

`register` adds names to Transformers' two public registries, AttentionInterface and
AttentionMaskInterface. A mask stays two-dimensional or None, as for FlashAttention: no mask of
(queries, keys) is built. Sliding windows, softcap and sinks reach the op in every mode.

Under continuous batching the op reads full-attention layers through a block table from
Transformers' own pages, where new keys and values are written by slot. Sliding layers keep their
ring buffer, which Transformers gathers. Tensors are read on the host only where Transformers' own
flash path reads them: padding masks, and positions of a row that may be packed. Works with
Transformers 5.17 to 5.23.
"""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.integrations._versions import require
from torch_paged_attn.ops import flash_varlen, reshape_and_cache

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
        AttentionMaskInterface.register(name, padding_mask)


def use(model: Any) -> Any:
    """Let `model` use our attention, continuous batching included. Returns the model."""
    from transformers import AttentionInterface

    register()
    if "paged|sdpa" in AttentionInterface().valid_keys():
        model.set_attn_implementation(NAME)
    else:
        model.config._attn_implementation = BATCH_NAME
    return model


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor | None:
    """The (batch, keys) mask of a forward pass, None if no key is hidden."""
    from transformers.masking_utils import flash_attention_mask

    written = q_offset + q_length - kv_offset
    if (
        attention_mask is None and written < kv_length
    ):  # the rest of a static cache is not there yet
        return torch.ones(batch_size, written, dtype=torch.bool, device=device)
    return flash_attention_mask(batch_size, q_length, kv_length, attention_mask=attention_mask)


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as Transformers' models call it.

    query: (batch, num_heads, Lq, head_dim)
    key, value: (batch, num_kv_heads, Lk, head_dim), all keys of the cache; under continuous
        batching the new ones

    Returns (batch, Lq, num_heads, head_dim_v) and None in place of attention weights.
    """
    if dropout > 0:
        raise NotImplementedError(
            f"torch_paged_attn: dropout must be 0 in Transformers, got {dropout}"
        )
    if position_bias is not None:
        raise NotImplementedError("torch_paged_attn: position_bias: use attn_implementation='sdpa'")

    if sliding_window is not None and sliding_window < 1:
        # Transformers' masks show such a layer no key, and its SDPA answers 0; the op's -1 would
        # show it all keys
        batch, heads, length, _ = query.shape
        return query.new_zeros(batch, length, heads, value.shape[3]), None
    window = -1 if sliding_window is None else sliding_window - 1
    options = {
        "sinks": None if s_aux is None else s_aux.float(),
        "softmax_scale": scaling,
        "causal": getattr(module, "is_causal", True) if is_causal is None else is_causal,
        "window_size_left": window,
        "window_size_right": window,
        "softcap": softcap or 0.0,
    }
    if cache is not None:
        out = _continuous(
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
    elif attention_mask is not None and attention_mask.dim() == 2:
        return _padded(query, key, value, attention_mask, options), None
    elif cu_seq_lens_q is not None:
        out = _packed(query, key, value, cu_seq_lens_q, cu_seq_lens_k, options)
    elif (cu_seqlens := _packed_row(query, key, position_ids)) is not None:
        out = _packed(query, key, value, cu_seqlens, None, options)
    else:
        out = _dense(query, key, value, attention_mask, options)
    return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None


def _rows(x: Tensor) -> Tensor:
    """(batch, heads, length, head_dim) as (tokens, heads, head_dim), which the op takes."""
    return x.transpose(1, 2).flatten(0, 1)


def _cu_seqlens(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _packed_row(query: Tensor, key: Tensor, position_ids: Tensor | None) -> Tensor | None:
    """cu_seqlens of a packed row, which is one whose positions start over; None for other rows."""
    batch, _, length, _ = query.shape
    if position_ids is None or position_ids.dim() != 2:
        return None
    if batch > 1 or length == 1 or length != key.shape[2]:
        return None
    starts = 1 + (position_ids[0].diff() != 1).nonzero().flatten()
    if not len(starts):
        return None
    return torch.nn.functional.pad(torch.cat([starts, starts.new_tensor([length])]), (1, 0)).int()


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
    q, k, v = _rows(query), _rows(key), _rows(value)
    return flash_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)[0]


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Sequences of one length without padding. A four-dimensional mask becomes attn_bias."""
    batch, _, query_len, _ = query.shape
    key_len = key.shape[2]
    if attention_mask is not None:
        bias = attention_mask.expand(batch, -1, query_len, -1).transpose(0, 1).flatten(1, 2)
        options = {**options, "attn_bias": bias, "causal": False}
    cu_seqlens_q = query_len * torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    if query_len == key_len:
        return _packed(query, key, value, cu_seqlens_q, None, options)
    # a cache of (batch, heads, length, head_dim) has one page per sequence: nothing is copied
    return flash_varlen(
        _rows(query),
        key,
        value,
        cu_seqlens_q,
        None,
        seqused_k=torch.full((batch,), key_len, dtype=torch.int32, device=key.device),
        block_table=torch.arange(batch, dtype=torch.int32, device=key.device)[:, None],
        **options,
    )[0]


def _padded(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attention without the padding. The mask is (batch, keys); its last columns are queries."""
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
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    out[queries] = packed
    return out


def _continuous(
    layer_idx: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Any,
    cache: Any,
    step: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    """One step of `generate_batch`: a row of new tokens. Older keys are in Transformers' cache."""
    group, pages = _pages(cache, layer_idx)
    max_seqlen_k = step["max_length_k" if "max_length_k" in step else "max_seqlen_k"]  # 5.17
    if isinstance(cu_seqlens_k, dict):
        layer_type = "sliding_attention" if pages is None else "full_attention"
        cu_seqlens_k, max_seqlen_k = cu_seqlens_k[layer_type], max_seqlen_k[layer_type]
    if pages is None:
        key, value = _gathered(cache, layer_idx, key, value, step, group)
        return flash_varlen(_rows(query), key, value, cu_seqlens_q, cu_seqlens_k, **options)[0]

    k_pages, v_pages = pages
    written, read = step["write_index"][group], step["read_index"][group]
    reshape_and_cache(_rows(key), _rows(value), pages, written)
    # if there is nothing to read, every key of these sequences is new
    slots = read if read.numel() else written
    return flash_varlen(
        _rows(query),
        k_pages,
        v_pages,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table=_block_table(slots, cu_seqlens_k, k_pages.shape[2], max_seqlen_k),
        **options,
    )[0]


def _block_table(slots: Tensor, cu_seqlens_k: Tensor, page_size: int, max_seqlen_k: int) -> Tensor:
    """Pages of each sequence from the slots of its keys, computed on the device without a sync."""
    first_keys = torch.arange(0, max_seqlen_k, page_size, device=slots.device)
    keys = cu_seqlens_k[:-1, None] + first_keys
    return (slots[keys.clamp_(max=len(slots) - 1)] // page_size).int()


def _pages(cache: Any, layer_idx: int) -> tuple[int, tuple[Tensor, Tensor] | None]:
    """A layer's place in the step's index lists, and its (k, v) pages; None for a sliding layer."""
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[layer_idx]
        if allocator.layer_type == "sliding_attention":
            return allocator.index, None
        group, pages = allocator.index, allocator.get_cache_for_block_table(layer_idx)
    else:  # 5.17
        group, i = cache.layer_index_to_group_indices[layer_idx]
        if cache.sliding_windows[layer_idx] != 1:
            return group, None
        shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        pages = cache.key_cache[i].view(shape), cache.value_cache[i].view(shape)
    k_pages, v_pages = pages
    return group, (k_pages.transpose(1, 2), v_pages.transpose(1, 2))


def _gathered(
    cache: Any, layer_idx: int, key: Tensor, value: Tensor, step: dict[str, Any], group: int
) -> tuple[Tensor, Tensor]:
    """Write a sliding layer's new keys and values; return all rows that its sequences still see."""
    if hasattr(cache, "layer_to_allocator"):
        indices = step["read_index"][group], step["write_index"][group]
        allocator = cache.layer_to_allocator[layer_idx]
        return allocator.update(_rows(key), _rows(value), layer_idx, *indices)
    return cache.update(key, value, layer_idx, step["read_index"], step["write_index"])  # 5.17
