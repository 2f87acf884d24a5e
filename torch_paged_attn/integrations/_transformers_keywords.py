"""Keywords with which Transformers' models call attention: those that are refused, and sinks of
each query.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

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
