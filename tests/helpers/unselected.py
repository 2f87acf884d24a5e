"""Which keys of a call no list of selected keys names."""

import functools

import torch

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.reference.attention import scored_sequences
from torch_paged_attn.reference.selected_attention import selected_mask, with_sequences


def unselected(call):
    """Of packed k or of a cache, bool: the keys that no query sees."""
    attention = AttentionCall.selected_attention(**call.args)
    k = attention.k
    is_unseen = torch.ones(k.shape[:-1], dtype=torch.bool)
    attention = with_sequences(attention)
    mask = functools.partial(selected_mask, attention)
    for b, x in enumerate(scored_sequences(attention, torch.float32, mask)):
        seen = x.visible.unflatten(0, (k.shape[1], -1)).any(1).any(1)  # (num_kv_heads, Lk)
        for head, j in seen.nonzero().tolist():
            if call.args.get("block_table") is not None:
                page = int(call.args["block_table"][b, j // k.shape[2]])
                is_unseen[page, head, j % k.shape[2]] = False
            elif k.dim() == 4:
                is_unseen[j // k.shape[2], head, j % k.shape[2]] = False
            else:
                is_unseen[x.first_key + j, head] = False
    return is_unseen
