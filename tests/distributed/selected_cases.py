"""Lists of keys dealt out over ranks: entries of other ranks' keys are -1, results are merged."""

import torch
import torch.distributed as dist

import torch_paged_attn as tpa
from torch_paged_attn.distributed import decode
from torch_paged_attn.testing import Call, assert_accurate


def local_units(units, world, per_turn):
    """Units of whole sequences as this rank numbers its own; -1 for the others. Each rank in turn
    has `per_turn` neighbouring units.
    """
    is_own = (units >= 0) & (units // per_turn % world.size == world.rank)
    local = units // (per_turn * world.size) * per_turn + units % per_turn
    return torch.where(is_own, local, -1)


def merged(out, lse, world):
    """The results of all ranks, merged on each of them."""
    parts = []
    for x in (out.contiguous(), lse.contiguous()):
        found = [torch.empty_like(x) for _ in range(world.size)]
        dist.all_gather(found, x)
        parts.append(found)
    out, lse = parts[0][0], parts[1][0]
    for next_out, next_lse in zip(parts[0][1:], parts[1][1:], strict=True):
        out, lse = tpa.merge_states(out, lse, next_out, next_lse)
    return out, lse


def lists_of(world, rows, groups, count, entries, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(rows, groups, count, generator=g).argsort(-1)[..., :entries].int()


def case_lists_of_single_keys(world):
    """A prompt under a causal mask, which is in the lists that ranks get. The sink is on one."""
    tokens, heads = 37, 4
    q, k, v = (world.randn(tokens, n, 16, seed=n + i) for i, n in enumerate((heads, 1, 1)))
    lists = lists_of(world, tokens, 1, tokens, 9, seed=5)
    lists[3] = -1
    sinks, bounds = world.randn(heads, seed=7), torch.tensor([0, tokens], dtype=torch.int32)
    whole = {"q": q, "k": k, "v": v, "key_indices": lists, "cu_seqlens_q": bounds, "sinks": sinks}
    truth = Call("selected_attention", whole).truth()

    position = torch.arange(tokens)[:, None, None]
    own = torch.arange(tokens)[torch.arange(tokens) % world.size == world.rank]
    out, lse = tpa.selected_attention(
        q,
        k[own],
        v[own],
        local_units(lists.where(lists <= position, -1), world, 1).int(),
        bounds,
        torch.tensor([0, len(own)], dtype=torch.int32),
        sinks=sinks if world.rank == 0 else None,
        causal=False,
    )
    assert_accurate(*merged(out, lse, world), truth)


def case_lists_of_blocks_in_decode(world):
    """Pages of 16 keys dealt out in turn; the last one is cut by the sequence's length."""
    lengths = torch.tensor([100, 7, 0, 161], dtype=torch.int32)
    batch, size, pages = len(lengths), 16, 11
    cache = world.randn(2, batch * pages, 2, size, 32, seed=1)
    table = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(2))
    table = table.view(batch, pages).int()
    q, bounds = world.randn(batch, 8, 32, seed=3), torch.arange(batch + 1, dtype=torch.int32)
    lists = lists_of(world, batch, 2, pages, 5, seed=4)
    whole = {"q": q, "k": cache[0], "v": cache[1], "key_indices": lists, "cu_seqlens_q": bounds}
    whole |= {"seqused_k": lengths, "block_table": table, "select_size": size}
    truth = Call("selected_attention", whole).truth()

    own = table[:, world.rank :: world.size].contiguous()
    out, lse = tpa.selected_attention(
        q,
        *cache,
        local_units(lists, world, 1).int(),
        bounds,
        seqused_k=decode.local_lengths(lengths, interleave=size),
        block_table=own,
        select_size=size,
        causal=False,
    )
    assert_accurate(*merged(out, lse, world), truth)
