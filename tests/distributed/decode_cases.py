"""Decode over a cache dealt out by position: by the accuracy rule of one process."""

from functools import partial

import torch
from worlds import World

import torch_paged_attn as tpa
from torch_paged_attn import reference
from torch_paged_attn.distributed import decode
from torch_paged_attn.distributed.combine import COMBINES as MERGES
from torch_paged_attn.distributed.ranks import Ranks
from torch_paged_attn.testing import Truth, assert_accurate, assert_same_in_float64

PAGE, DIM = 4, 16
COMBINES = ("all_gather", "reduce_scatter", "all_to_all")


class Dealt:
    """Keys of a batch in pages, and this rank's share of them in pages of its own, in which slots
    that hold nothing are NaN.
    """

    def __init__(self, world, lengths, heads=8, kv_heads=2, interleave=1, dtype=torch.float32):
        self.world, self.interleave = world, interleave
        batch, pages = len(lengths), -(-max(lengths) // PAGE)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.cache = world.randn(2, batch * pages, kv_heads, PAGE, DIM, seed=1, dtype=dtype)
        self.table = self.pages(batch, pages, seed=2)
        self.own = torch.full_like(self.cache, float("nan"))
        self.own_table = self.pages(batch, pages, seed=3 + world.rank)
        self.bounds = torch.arange(batch + 1, dtype=torch.int32)
        self.heads, self.dtype = heads, dtype
        sequences = torch.arange(batch).repeat_interleave(self.lengths)
        self.write(torch.cat([torch.arange(n) for n in lengths]), sequences)

    @staticmethod
    def pages(batch, pages, seed):
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(seed))
        return order.view(batch, pages).int()

    def write(self, positions, sequences):
        """Every rank is given all tokens, and writes its own."""
        page = self.table[sequences, positions // PAGE].long()
        key, value = (x[page, :, positions % PAGE] for x in self.cache)
        slots = decode.local_slots(
            *(positions, sequences, self.own_table, PAGE), interleave=self.interleave
        )
        tpa.reshape_and_cache(key, value, self.own, slots)

    def q(self, tokens, dtype=None):
        return self.world.randn(tokens, self.heads, DIM, seed=9, dtype=dtype or self.dtype)

    def attend(self, q, combine, bounds=None, **options):
        """All heads on every rank."""
        out, lse = decode.decode_attention(
            *(q, *self.own, bounds, self.lengths, self.own_table),
            combine=combine,
            interleave=self.interleave,
            **options,
        )
        heads = self.heads // self.world.size
        assert out.shape == (len(q), heads, DIM) and lse.shape == (heads, len(q))
        return decode.gather_heads(out), decode.gather_heads(lse.mT[..., None])[..., 0].mT

    def truth(self, q, bounds=None, **options):
        given = {"q": q, "k": self.cache[0], "v": self.cache[1], "seqused_k": self.lengths}
        given |= {"cu_seqlens_q": self.bounds if bounds is None else bounds}
        given |= {"max_seqlen_q": 0, "max_seqlen_k": 0, "block_table": self.table}
        return Truth.of(reference.flash_varlen, **given, **options)


def case_combines(world: World) -> None:
    sinks = world.randn(8, seed=11)
    for dtype in (torch.float32, torch.bfloat16):
        # of the second sequence, some ranks have nothing
        for interleave in (1, 2, 3, PAGE):
            dealt = Dealt(world, (9, 1, 30), interleave=interleave, dtype=dtype)
            q = dealt.q(3)
            for options in ({}, {"sinks": sinks, "softcap": 3.0, "causal": True}):
                truth = dealt.truth(q, **options)
                for combine in COMBINES:
                    assert_accurate(*dealt.attend(q, combine, **options), truth)


def case_parts_of_far_logits(world: World) -> None:
    """Each rank's part has the same weight; the logarithm of their number is lost in float32."""
    ranks = Ranks.of("test")
    for far in (1e30, torch.finfo(torch.float32).min):
        out = torch.full((3, 8, DIM), float(world.rank))
        lse = torch.full((8, 3), far)
        lse[:, 1] = -torch.inf  # a row that no rank has keys of
        wanted = torch.full((3, 8 // world.size, DIM), (world.size - 1) / 2)
        wanted[1] = 0.0
        for merge in MERGES.values():
            merged, merged_lse = merge(out, lse, ranks, torch.float32)
            assert_same_in_float64(merged.double(), wanted.double())
            assert torch.equal(merged_lse, lse[: len(merged_lse)])


def case_masks_compare_positions_of_the_whole(world: World) -> None:
    """Several queries of a sequence, windows and slopes over keys that are dealt out."""
    slopes = world.randn(8, seed=12).abs()
    bounds = torch.tensor([0, 4, 5, 12], dtype=torch.int32)
    one = torch.arange(4, dtype=torch.int32)
    for interleave in (1, 3, PAGE):
        dealt = Dealt(world, (9, 1, 30), interleave=interleave)
        for cu_seqlens_q, options in (
            (bounds, {"causal": True}),
            (bounds, {"causal": True, "window_size_left": 5, "alibi_slopes": slopes}),
            (bounds, {"window_size_left": 4, "window_size_right": 2}),
            (one, {"causal": True, "window_size_left": 5}),
        ):
            q = dealt.q(int(cu_seqlens_q[-1]))
            truth = dealt.truth(q, cu_seqlens_q, **options)
            given = None if cu_seqlens_q is one else cu_seqlens_q
            for combine in COMBINES[interleave == 1 :]:
                assert_accurate(*dealt.attend(q, combine, given, **options), truth)


def case_shared_latents(world: World) -> None:
    """MLA: one head of keys, whose first numbers are the values."""
    dealt = Dealt(world, (17, 5), kv_heads=1)
    q = dealt.q(2)
    k, own = dealt.cache[0], dealt.own[0]
    out, lse = decode.decode_attention(q, own, own[..., :8], None, dealt.lengths, dealt.own_table)
    given = {"q": q, "k": k, "v": k[..., :8], "seqused_k": dealt.lengths}
    given |= {"cu_seqlens_q": dealt.bounds, "block_table": dealt.table}
    truth = Truth.of(reference.flash_varlen, max_seqlen_q=0, max_seqlen_k=0, **given)
    lse = decode.gather_heads(lse.mT[..., None])[..., 0].mT
    assert_accurate(decode.gather_heads(out), lse, truth)


def case_out_dtype(world: World) -> None:
    dealt = Dealt(world, (17, 5), dtype=torch.bfloat16)
    q = dealt.q(2)
    for combine in COMBINES:
        out, lse = dealt.attend(q, combine, out_dtype=torch.float32)
        assert_accurate(out, lse, dealt.truth(q, out_dtype=torch.float32))


def case_autocast(world: World) -> None:
    """Queries are cast to the dtype of the cache, before they are checked."""
    dealt = Dealt(world, (17, 5), dtype=torch.bfloat16)
    q = dealt.q(2)
    for combine in COMBINES:
        wanted = dealt.attend(q, combine)
        with torch.autocast("cpu", torch.float16):
            found = dealt.attend(q.float(), combine)
        assert all(map(torch.equal, found, wanted)), combine


def case_lengths(world: World) -> None:
    """Each position is on one rank."""
    lengths = torch.arange(200, dtype=torch.int32)
    for interleave in (1, 2, 3, 16):
        own = decode.local_lengths(lengths, interleave=interleave)
        positions = torch.arange(200)
        mine = positions // interleave % world.size == world.rank
        assert torch.equal(own.long(), torch.cat([torch.zeros(1), mine.cumsum(0)[:-1]]).long())


def case_errors_are_everyones(world: World) -> None:
    dealt = Dealt(world, (9, 1, 30))
    q = dealt.q(3)
    attend = partial(decode.decode_attention, k=dealt.own[0], v=dealt.own[1], cu_seqlens_q=None)
    attend = partial(attend, lengths=dealt.lengths, block_table=dealt.own_table)
    dropout = partial(attend, q, dropout_p=0.5)
    world.refuses(dropout, NotImplementedError, "decode_attention", "dropout_p")
    world.refuses(partial(attend, q, combine="x"), ValueError, "combine", "all_to_all")
    world.refuses(partial(attend, q, interleave=0), ValueError, "interleave")
    one = Dealt(world, (9, 1, 30), heads=world.size + 1, kv_heads=1)
    odd = partial(attend, one.q(3), k=one.own[0], v=one.own[1])
    world.refuses(odd, ValueError, "num_heads", f"{world.size} ranks")
    wrong = q.double() if world.rank == 1 else q
    world.refuses(partial(attend, wrong), ValueError, "got float64")
    other = COMBINES[0] if world.rank == 0 else COMBINES[1]
    world.refuses(partial(attend, q, combine=other), ValueError, "the same on every rank")
    symmetric = partial(decode.SymmetricCombine, None, 3, 8, DIM, "cpu")
    world.refuses(symmetric, NotImplementedError, "SymmetricCombine", "cpu", "all_to_all")
