"""Keywords with which Transformers' models call attention: which keys a list of theirs shows, and
which keywords are refused.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.integrations._transformers_short import ShortMask

# keywords of models that change no result of attention, or that a pass of `generate_batch` has
IGNORED = {
    *("max_length_q", "max_length_k", "max_seqlen_q", "max_seqlen_k", "seq_idx"),
    *("read_index", "write_index", "block_table", "logits_indices", "logits_processor_args"),
    *("deterministic", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("num_items_in_batch", "return_dict", "use_cache", "logits_to_keep", "cache_position"),
}


def refuse_unknown(keywords: dict[str, Any]) -> None:
    """Raise NotImplementedError for a keyword that may change a result and is not applied."""
    for name in keywords.keys() - IGNORED:
        if keywords[name] is not None:
            raise NotImplementedError(
                f"torch_paged_attn: a layer calls attention with {name}, which is not supported and"
                " may change results: if it does not, add the name to"
                " torch_paged_attn.integrations.transformers.IGNORED"
            )
    if keywords.get("output_attentions"):
        warnings.warn(
            "torch_paged_attn computes no attention weights: for output_attentions=True use"
            " attn_implementation='eager'",
            stacklevel=3,
        )


def listed_mask(
    module: Any,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool,
    indices: Tensor | None,
    block_indices: Tensor | None,
) -> Tensor:
    """A mask (batch, 1 or num_heads, Lq, Lk) of the keys that lists name, of those that
    `attention_mask` shows. `is_causal` applies if that is None.
    """
    num_heads, query_len, key_len = query.shape[1], query.shape[2], key.shape[2]
    if indices is not None:
        listed = _named(indices[:, None], key_len)
    else:
        assert block_indices is not None
        size = module.indexer.block_size
        listed = _named(block_indices, -(-key_len // size))
        listed = listed.repeat_interleave(size, -1)[..., :key_len]
        listed = listed.repeat_interleave(num_heads // listed.shape[1], 1)
    if attention_mask is None:
        if is_causal:
            seen = torch.ones(query_len, key_len, dtype=torch.bool, device=key.device)
            listed = listed & seen.tril(key_len - query_len)
        return listed
    if isinstance(attention_mask, ShortMask):
        attention_mask = attention_mask.full()
    if attention_mask.dim() == 2:
        attention_mask = attention_mask[:, None, None].bool()
        listed = listed[..., : attention_mask.shape[3]]
    if attention_mask.dim() != 4:
        raise NotImplementedError(
            "torch_paged_attn: lists of keys (indices, block_indices) are not supported with packed"
            " rows: use rows of one sequence each"
        )
    if attention_mask.dtype == torch.bool:
        return attention_mask & listed
    return attention_mask.masked_fill(~listed, float("-inf"))


def _named(indices: Tensor, count: int) -> Tensor:
    """(..., n) numbers, -1 for none, as (..., count) bool."""
    where = indices.long().masked_fill(indices < 0, count)
    named = torch.zeros(*where.shape[:-1], count + 1, dtype=torch.bool, device=where.device)
    return named.scatter(-1, where, True)[..., :count]


def with_sinks(
    key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A sink of each query, (batch, num_heads, Lq, 1), as one more key: its logit is the sink, its
    value is 0.
    """
    batch, num_heads, query_len, _ = sinks.shape
    key, value = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
    bias = bias.expand(batch, num_heads, query_len, -1)
    return key, value, torch.cat([bias, sinks.to(bias.dtype)], -1)
