"""Peers that come with torch, and what every peer shares.

A peer says why it cannot take a call (`unavailable`) or prepares it: its own layout of the keys and
values, plans and buffers are made beforehand and cost it nothing. One that lacks paging gets dense
keys, one that lacks 8-bit caches gets the real values in q's dtype: both favour the peer.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from workloads import BackwardWorkload, CacheWriteWorkload, sequence_lengths, visible

from torch_paged_attn.testing import Call

# bytes of keys and values that SDPA may repeat for the query heads of a group
MOST_REPEATED = 2 * 2**30


@dataclasses.dataclass(frozen=True)
class Prepared:
    """`run` is timed; `out` turns what it returned into (total_q, num_heads, head_dim_v), that of a
    backward into dq, dk and dv.
    """

    run: Callable[[], Any]
    out: Callable[[Any], Any]


class Peer(Protocol):
    """Somebody else's attention."""

    name: str

    def unavailable(self, call: Call) -> str | None: ...

    def prepare(self, call: Call) -> Prepared: ...


def queries(call: Call) -> Tensor:
    """All queries, with the latent ones behind the others."""
    q, latent = call.args["q"], call.args.get("q_latent")
    return q if latent is None else torch.cat([q, latent], -1)


def keys_and_values(call: Call, b: int, descaled: bool = True) -> tuple[Tensor, Tensor]:
    """Keys and values of sequence `b`, dense (num_kv_heads, Lk, head_dim), in q's dtype.

    Beside latent queries the values stand behind the keys, too.
    """
    args, key_len = call.args, sequence_lengths(call)[b][1]
    dense = []
    for name in ("k", "v"):
        stored, descale = args[name], args.get(f"{name}_descale")
        if (table := args.get("block_table")) is not None:
            page_size = stored.shape[2]
            pages = table[b, : -(-key_len // page_size)].long()
            real = stored[pages].transpose(0, 1).flatten(1, 2)[:, :key_len]
        else:
            real = stored[args["cu_seqlens_q"][b] :][:key_len].transpose(0, 1)
        if descaled and descale is not None:
            real = real.float() * descale
        dense.append(real.to(args["q"].dtype).contiguous())
    k, v = dense
    return (k if args.get("q_latent") is None else torch.cat([k, v], -1)), v


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of equal lengths, dense, laid out as `scaled_dot_product_attention` likes them."""

    rows: Tensor  # (sequences, Lq): their rows of q
    q: Tensor  # (sequences, num_heads, Lq, head_dim)
    k: Tensor  # (sequences, num_kv_heads, Lk, head_dim)
    v: Tensor
    mask: Tensor | None  # None: everything visible, or causal with Lq == Lk
    causal: bool


def batches(call: Call) -> list[Batch]:
    """The call as as few dense batches as possible."""
    lengths = sequence_lengths(call)
    starts = call.args["cu_seqlens_q"]
    made = []
    for query_len, key_len in dict.fromkeys(lengths):
        members = [b for b, length in enumerate(lengths) if length == (query_len, key_len)]
        rows = torch.stack([torch.arange(query_len) + starts[b] for b in members])
        q = queries(call)[rows].transpose(1, 2).contiguous()
        dense = [keys_and_values(call, b) for b in members]
        k, v = (torch.stack(x) for x in zip(*dense, strict=True))
        causal = call.op == "flash_varlen" and query_len == key_len > 1 and call.args["causal"]
        mask = None
        if call.args["causal"] and not causal and (query_len > 1 or call.op == "blocksparse"):
            mask = visible(call, members[0])
            if len(mask) > 1:
                mask = mask.repeat_interleave(q.shape[1] // len(mask), 0)
            mask = mask[None]  # three dimensions would send SDPA down its slow path
        made.append(Batch(rows, q, k, v, mask, causal))
    return made


def assemble(call: Call, outs: list[Tensor], rows: list[Tensor]) -> Tensor:
    """(sequences, num_heads, Lq, head_dim_v) of every batch as one packed result."""
    q, v = call.args["q"], call.args["v"]
    result = q.new_zeros(*q.shape[:2], v.shape[-1])
    for out, at in zip(outs, rows, strict=True):
        result[at] = out.transpose(1, 2)
    return result


class Sdpa:
    """`scaled_dot_product_attention(enable_gqa=True)`, one call for each pair of lengths."""

    name = "SDPA"

    def unavailable(self, call: Call) -> str | None:
        if call.op == "blocksparse":
            return "a dense mask per head: seconds a call"
        keys = sum(key_len for _, key_len in sequence_lengths(call))
        row = queries(call).shape[-1] + call.args["v"].shape[-1]
        repeated = keys * call.args["q"].shape[1] * row * call.args["q"].itemsize
        too_large = repeated > MOST_REPEATED
        return "repeats keys for each query head: gigabytes" if too_large else None

    def prepare(self, call: Call) -> Prepared:
        parts, scale = batches(call), call.args.get("softmax_scale")

        def run() -> list[Tensor]:
            return [
                scaled_dot_product_attention(
                    x.q, x.k, x.v, x.mask, is_causal=x.causal, scale=scale, enable_gqa=True
                )
                for x in parts
            ]

        return Prepared(run, lambda outs: assemble(call, outs, [x.rows for x in parts]))


class SdpaBackward:
    """aten's flash backward, one sequence length at a time, or padded to one batch.

    It has no groups: KV heads are repeated beforehand, and their gradients not summed, which costs
    it nothing here. Forward and backward together, it computes both.
    """

    def __init__(self, name: str, padded: bool) -> None:
        self.name, self.padded = name, padded

    def unavailable(self, work: BackwardWorkload) -> str | None:
        ragged = len(set(sequence_lengths(work.call))) > 1
        return "sequences are of one length" if self.padded and not ragged else None

    def prepare(self, work: BackwardWorkload) -> Prepared:
        args, lengths = work.call.args, sequence_lengths(work.call)
        starts, groups = args["cu_seqlens_q"].tolist(), args["q"].shape[1] // args["k"].shape[1]
        longest = max(query_len for query_len, _ in lengths)
        # rows of each batch, and which of them count
        if self.padded:
            spans = [torch.arange(longest) + start for start in starts[:-1]]
            used = torch.stack([torch.arange(longest) < n for n, _ in lengths])
            parts = [(torch.stack(spans).clamp(max=starts[-1] - 1), used)]
        else:
            parts = []
            for length in dict.fromkeys(lengths):
                members = [b for b, other in enumerate(lengths) if other == length]
                rows = torch.stack([torch.arange(length[0]) + starts[b] for b in members])
                parts.append((rows, torch.ones_like(rows, dtype=torch.bool)))
        inputs, douts, outs = [], [], []
        with torch.inference_mode(False), torch.enable_grad():
            for rows, used in parts:
                q, k, v = (args[name].clone()[rows].transpose(1, 2) for name in "qkv")
                k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
                inputs.append([x.contiguous().requires_grad_() for x in (q, k, v)])
                dout = work.dout.clone()[rows].masked_fill(~used[..., None, None], 0)
                douts.append(dout.transpose(1, 2).contiguous())
                outs.append(scaled_dot_product_attention(*inputs[-1], is_causal=True))

        def run() -> list[tuple[Tensor, ...]]:
            gradients = []
            with torch.inference_mode(False), torch.enable_grad():
                for x, out, dout in zip(inputs, outs, douts, strict=True):
                    if work.both:
                        out = scaled_dot_product_attention(*x, is_causal=True)
                    gradients.append(torch.autograd.grad(out, x, dout, retain_graph=True))
            return gradients

        def packed(gradients: list[tuple[Tensor, ...]]) -> list[Tensor]:
            results = [torch.zeros_like(args[name]) for name in "qkv"]
            for of_part, (rows, used) in zip(gradients, parts, strict=True):
                for i, (result, x) in enumerate(zip(results, of_part, strict=True)):
                    x = x if i == 0 else x.unflatten(1, (-1, groups)).sum(2)
                    result[rows[used]] = x.transpose(1, 2)[used]
            return results

        return Prepared(run, packed)


class SdpaFolded:
    """SDPA with the query heads of a KV head as its rows: how plain torch decodes fast."""

    name = "SDPA folded"

    def unavailable(self, call: Call) -> str | None:
        longest = max(query_len for query_len, _ in sequence_lengths(call))
        return "folds decode steps only" if longest > 1 or call.op == "blocksparse" else None

    def prepare(self, call: Call) -> Prepared:
        parts, scale = batches(call), call.args.get("softmax_scale")
        folded = [x.q.view(len(x.q), x.k.shape[1], -1, x.q.shape[-1]) for x in parts]

        def run() -> list[Tensor]:
            pairs = zip(folded, parts, strict=True)
            return [scaled_dot_product_attention(q, x.k, x.v, scale=scale) for q, x in pairs]

        def out(outs: list[Tensor]) -> Tensor:
            unfolded = [o.reshape(*x.q.shape[:3], -1) for o, x in zip(outs, parts, strict=True)]
            return assemble(call, unfolded, [x.rows for x in parts])

        return Prepared(run, out)


class Flex:
    """Compiled `flex_attention` with a causal or block-sparse BlockMask. Compiles for a minute."""

    name = "flex"

    def unavailable(self, call: Call) -> str | None:
        lengths = sequence_lengths(call)
        if len(lengths) > 1 or lengths[0][0] != lengths[0][1] or not call.args["causal"]:
            return "measured on one causal prompt only"
        return None

    def prepare(self, call: Call) -> Prepared:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        (part,) = batches(call)
        length, block = part.q.shape[2], call.args.get("k_block_size", 128)
        mask = part.mask

        def visible(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return row >= key if mask is None else mask[0, h, row, key]

        heads = None if mask is None else mask.shape[1]
        block_mask = create_block_mask(visible, None, heads, length, length, "cpu", block)
        # problems and thread counts compile anew each; past a limit torch silently would not
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        run = functools.partial(
            compiled, part.q, part.k, part.v, block_mask=block_mask, enable_gqa=True
        )
        return Prepared(run, lambda out: assemble(call, [out], [part.rows]))


class Without:
    """Our own `flash_varlen` on the same tensors without an option: what that costs, or saves."""

    def __init__(self, name: str, *arguments: str) -> None:
        self.name, self.arguments = name, arguments

    def unavailable(self, call: Call) -> str | None:
        return None if self.arguments[0] in call.args else f"no {self.arguments[0]} in the call"

    def prepare(self, call: Call) -> Prepared:
        args = {name: value for name, value in call.args.items() if name not in self.arguments}
        plain = dataclasses.replace(call, op="flash_varlen", args=args)
        return Prepared(plain.run, lambda _: call.run()[0])  # another result, by design


OWN_PEERS = (
    Without("dense (ours)", "crow_indices", "col_indices", "q_block_size", "k_block_size"),
    Without("no dropout (ours)", "rng_state", "dropout_p"),
)


class IndexPut:
    """Cache writes as plain torch: `cache[pages, :, offsets] = key`."""

    name = "index_put"

    def unavailable(self, work: CacheWriteWorkload) -> str | None:
        return None

    def prepare(self, work: CacheWriteWorkload) -> Prepared:
        caches = work.empty_caches()
        page_size = work.cache_shape[2]
        places = [(slots // page_size, slots % page_size) for slots in work.slot_mappings]
        next_places = itertools.cycle(places)
        # torch indexes no float8 tensor: bytes move alike, and the cast is part of the job
        views = [cache.view(torch.uint8) if cache.itemsize == 1 else cache for cache in caches]

        def run() -> None:
            pages, offsets = next(next_places)
            for view, cache, rows in zip(views, caches, (work.key, work.value), strict=True):
                view[pages, :, offsets] = rows.to(cache.dtype).view(view.dtype)

        return Prepared(run, lambda _: torch.stack(caches))


TORCH_PEERS: tuple[Peer, ...] = (Sdpa(), SdpaFolded(), *OWN_PEERS)
BACKWARD_PEERS = (SdpaBackward("SDPA", padded=False), SdpaBackward("SDPA padded", padded=True))
SLOW_PEERS: tuple[Peer, ...] = (Flex(),)
