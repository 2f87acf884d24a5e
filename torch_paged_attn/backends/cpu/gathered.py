"""Selected keys, gathered for one token at a time, of long lists some entries at a time: what ops
are composed of for which the library has no kernel. Memory is bounded. Products and sums are
float32.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.cpu.path import NO_KERNEL
from torch_paged_attn.ops import paths
from torch_paged_attn.ops.selected_checks import selected_keys, sequence_of

# float32 numbers in the gathered rows of a chunk
MOST_GATHERED = 2**22


def announce(op: str) -> None:
    """Log that an op has no kernel, when it runs for the first time."""
    paths.announce(op, "cpu", "composed of PyTorch operators", NO_KERNEL)


def chunks(call: AttentionCall) -> Iterator[tuple[slice, list[slice]]]:
    """Each row of q that is not padding, and the ranges of its list's entries."""
    selection = call.selection
    assert selection is not None
    total, entries = int(call.cu_seqlens_q[-1]), selection.key_indices.shape[2]
    width = call.num_kv_heads * selection.select_size * (call.head_dim + call.head_dim_v)
    at_once = max(1, MOST_GATHERED // width)
    parts = [slice(i, min(i + at_once, entries)) for i in range(0, entries, at_once)]
    for row in range(total):
        yield slice(row, row + 1), parts


@dataclasses.dataclass
class Chunk:
    """Some query rows with some of their selected keys, in float32 and descaled.

    `q` is `(rows, num_kv_heads, group_size, dim)`; `k` and `v` are `(rows, num_kv_heads, keys,
    dim)`, 0 where the query does not see the key; `is_seen` is `(rows, 1 or num_kv_heads, keys)`,
    and `where` of the keys' rows in packed k.
    """

    call: AttentionCall
    rows: slice
    q: Tensor
    k: Tensor
    v: Tensor
    is_seen: Tensor
    where: Tensor
    latent: Tensor | None

    @classmethod
    def of(cls, call: AttentionCall, rows: slice, entries: slice) -> "Chunk":
        """Gather the keys."""
        _, keys, is_seen = selected_keys(call, rows, entries)
        b = sequence_of(call, rows)
        keys = keys.where(is_seen, 0)
        heads = torch.arange(call.num_kv_heads, device=keys.device)[None, :, None]
        if not call.is_paged:
            where = (call.first_keys()[b][:, None, None] + keys).where(is_seen, 0)
            place: tuple[Tensor, ...] = where, heads
        else:
            page, where = keys // call.page_size, keys
            if call.block_table is not None:
                page = call.block_table[b[:, None, None], page.where(is_seen, 0)].long()
            place = page.where(is_seen, 0), heads, keys % call.page_size
        k, v = (
            _gathered(x, place, is_seen) * _factors(call, scale, b)
            for x, scale in ((call.k, call.k_descale), (call.v, call.v_descale))
        )
        group = call.num_kv_heads, call.group_size
        q_factors = _factors(call, call.q_descale, b)
        q = call.q[rows].float().unflatten(1, group) * q_factors
        latent = None
        if call.q_latent is not None:
            latent = call.q_latent[rows].float().unflatten(1, group) * q_factors
        return cls(call, rows, q, k, v, is_seen, where, latent)

    def scores(self) -> Tensor:
        """`(rows, num_kv_heads, group_size, keys)`: logits without the mask."""
        products = self.q @ self.k.mT
        if self.latent is not None:
            products = products + self.latent @ self.v.mT
        scores = products * self.call.scale
        if (softcap := self.call.softcap) > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        return scores

    def logits(self) -> Tensor:
        """`scores`, -inf where the query does not see the key."""
        return self.scores().masked_fill(~self.is_seen[:, :, None], float("-inf"))


def _gathered(stored: Tensor, place: tuple[Tensor, ...], is_seen: Tensor) -> Tensor:
    """`(rows, num_kv_heads, keys, dim)` float32. Keys that are not seen are 0, whether or not they
    exist.
    """
    rows, _, keys = is_seen.shape
    if stored.numel() == 0:
        return torch.zeros(rows, stored.shape[1], keys, stored.shape[-1], device=stored.device)
    if stored.dtype.itemsize == 1 and stored.dtype != torch.int8:
        stored, dtype = stored.view(torch.uint8), stored.dtype
        return _real(stored[place].view(dtype), is_seen)
    return _real(stored[place], is_seen)


def _real(gathered: Tensor, is_seen: Tensor) -> Tensor:
    return gathered.float().masked_fill(~is_seen[..., None], 0.0)


def _factors(call: AttentionCall, scale: Tensor | None, b: Tensor) -> Tensor | float:
    """A descale of any of its three shapes for rows of the sequences b."""
    if scale is None:
        return 1.0
    by_row = scale[b] if scale.dim() == 2 else scale
    return by_row.expand(b.shape[0], call.num_kv_heads)[:, :, None, None]
