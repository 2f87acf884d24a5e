"""Sequences of random numbers in every form that engines hand over: the tests' common ground.

Each sequence's queries, keys and values exist first by themselves; the truth is the reference on
them laid end to end. A test then hands the same numbers over as an engine would: paged, padded,
interleaved, half of them still to be appended.
"""

import torch

from torch_paged_attn import reference
from torch_paged_attn.testing.accuracy import Truth

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 16, 24
NAN = float("nan")


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


class Batch:
    """Sequences of random numbers, and every form in which engines hold them."""

    def __init__(self, query_lens, key_lens, dtype=torch.float32, dim_v=DIM_V, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.query_lens, self.key_lens = query_lens, key_lens
        self.q = torch.randn(sum(query_lens), HEADS, DIM, generator=g).to(dtype)
        self.k = torch.randn(sum(key_lens), KV_HEADS, DIM, generator=g).to(dtype)
        self.v = torch.randn(sum(key_lens), KV_HEADS, dim_v, generator=g).to(dtype)
        self.cu_q, self.cu_k = cumulative(query_lens), cumulative(key_lens)
        self.seqused_k = torch.tensor(key_lens, dtype=torch.int32)
        self.generator = g

    def truth(self, **options):
        return Truth.of(
            reference.flash_varlen, self.q, self.k, self.v, self.cu_q, self.cu_k, **options
        )

    def paged(self, page_size, written=None, spare=1, width=None):
        """k_cache, v_cache (pages, page_size, heads, dim), NaN where unwritten, and block_table.

        written: how many keys of each sequence are in the cache already; None: all
        """
        pages = [-(-length // page_size) for length in self.key_lens]
        num_pages = sum(pages) + spare
        order = torch.randperm(num_pages, generator=self.generator)
        table = torch.full((len(pages), width or max(pages, default=0)), -1, dtype=torch.int32)
        caches = [
            torch.full((num_pages, page_size, *x.shape[1:]), NAN, dtype=x.dtype)
            for x in (self.k, self.v)
        ]
        taken = 0
        for b, count in enumerate(pages):
            table[b, :count] = order[taken : taken + count].int()
            taken += count
            length = self.key_lens[b] if written is None else written[b]
            for x, cache in zip((self.k, self.v), caches, strict=True):
                for j in range(length):
                    page = int(table[b, j // page_size])
                    cache[page, j % page_size] = x[int(self.cu_k[b]) + j]
        return *caches, table

    def rows(self, size, written, leftpad=None):
        """k_cache, v_cache (batch, size, heads, dim) without pages."""
        caches = [
            torch.full((len(written), size, *x.shape[1:]), NAN, dtype=x.dtype)
            for x in (self.k, self.v)
        ]
        for b, length in enumerate(written):
            start = int(self.cu_k[b])
            first = 0 if leftpad is None else leftpad[b]
            for x, cache in zip((self.k, self.v), caches, strict=True):
                cache[b, first : first + length] = x[start : start + length]
        return caches

    def new(self, written):
        """The keys and values past those written, end to end."""
        index = torch.cat(
            [
                torch.arange(int(self.cu_k[b]) + done, int(self.cu_k[b + 1]))
                for b, done in enumerate(written)
            ]
        )
        return self.k[index], self.v[index]


MIXED = ([1, 5, 3, 1], [7, 5, 11, 1])
DECODE = ([1, 1, 1], [7, 12, 1])
