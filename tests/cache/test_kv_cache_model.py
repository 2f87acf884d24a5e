"""PagedKVCache against a model that is a dict of token lists.

Every token is stored as a value that depends on all tokens up to it, as real keys and values do:
a page shared wrongly, overwritten or not copied reads back as something else.
"""

import contextlib
import copy
import os
from collections import Counter

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from torch_paged_attn.kv_cache import CacheFull, PagedKVCache

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 2, 1
# tells the layers, and keys from values
MARK = torch.tensor([[1, -1], [2, -2]])[:, :, None, None]


def contents(tokens):
    """What a token's slot holds: exact in float32, decided by the whole prefix."""
    values, state = [], 1
    for token in tokens:
        state = (state * 31 + token + 7) % 1_000_003
        values.append(state)
    return torch.tensor(values, dtype=torch.float32)


class Uncopyable(torch.Tensor):
    """As a tensor made under inference_mode, outside of it."""

    def copy_(self, *_):
        raise OSError


class KVCacheMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(page_size=st.integers(1, 4), num_pages=st.integers(1, 8))
    def start(self, page_size, num_pages):
        self.cache = PagedKVCache(
            NUM_LAYERS, num_pages, NUM_HEADS, page_size, HEAD_DIM, dtype=torch.float32
        )
        self.cache.kv_cache.fill_(float("nan"))
        self.tokens = {}
        self.contents_of_hash = {}
        self.names = 0
        self.next_unknown = 1000

    def new_name(self):
        self.names += 1
        return self.names

    def append_and_write(self, seq, tokens, ids):
        before = self.host_state(), self.cache.kv_cache.clone()
        old = self.tokens.get(seq, [])
        try:
            reused = self.cache.append(seq, tokens if ids else len(tokens))
        except CacheFull as full:
            assert full.needed > full.available
            assert full.available <= self.cache.num_free_pages
            assert self.host_state() == before[0]
            assert torch.equal(self.cache.kv_cache.view(torch.int32), before[1].view(torch.int32))
            # with a copy of a page begun, and sharing nothing, it needs more than there is
            size = self.cache.page_size
            most = -(-(len(old) + len(tokens)) // size) - len(old) // size
            assert most > self.cache.num_free_pages
            return
        assert ids or reused == 0
        assert reused % self.cache.page_size == 0
        assert reused < max(len(tokens), 1)
        self.tokens[seq] = [*old, *tokens]
        written = contents(self.tokens[seq])[len(old) + reused :]
        slots = self.cache.batch([seq], [len(written)]).slot_mapping.long()
        assert len(slots.unique()) == len(slots)
        page, offset = slots // self.cache.page_size, slots % self.cache.page_size
        # the two index tensors are apart: their dimension comes first
        self.cache.kv_cache[:, :, page, :, offset] = written[:, None, None, None, None] * MARK
        pages = contents(self.tokens[seq]).split(self.cache.page_size)
        self.contents_of_hash.update(zip(self.cache._sequences[seq].hashes, pages, strict=False))

    def host_state(self):
        return copy.deepcopy({k: v for k, v in vars(self.cache).items() if k != "kv_cache"})

    # few token ids, so that prefixes meet
    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), max_size=12), ids=st.booleans())
    def add(self, tokens, ids):
        seq = self.new_name()
        self.append_and_write(seq, self.known(tokens, ids), ids)
        return seq

    @rule(
        seq=sequences,
        tokens=st.lists(st.integers(0, 1), max_size=6),
        ids=st.sampled_from([1, 1, 0]),
    )
    def grow(self, seq, tokens, ids):
        self.append_and_write(seq, self.known(tokens, ids), ids)

    def known(self, tokens, ids):
        """Tokens given without ids are like no others."""
        if ids:
            return tokens
        self.next_unknown += len(tokens)
        return list(range(self.next_unknown - len(tokens), self.next_unknown))

    @rule(seq=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def append_where_copies_fail(self, seq, tokens):
        """A fork of a sequence cannot copy the page that it shares: all stays as it was."""
        if seq not in self.tokens:
            return
        cache, child = self.cache, self.new_name()
        cache.fork(seq, child)
        before, tensor = self.sequences_of_host(), cache.kv_cache
        free = cache.num_free_pages
        cache.kv_cache = tensor.as_subclass(Uncopyable)
        with contextlib.suppress(CacheFull, OSError):
            cache.append(child, tokens)
        cache.kv_cache = tensor
        if cache.length(child) == len(self.tokens[seq]):
            assert (self.sequences_of_host(), cache.num_free_pages) == (before, free)
        cache.free(child, written=len(self.tokens[seq]))

    def sequences_of_host(self):
        return copy.deepcopy((self.cache._sequences, self.cache._pool.ref_counts))

    @rule(target=sequences, parent=sequences)
    def fork(self, parent):
        child = self.new_name()
        if parent in self.tokens:
            self.cache.fork(parent, child)
            self.tokens[child] = list(self.tokens[parent])
        return child

    @rule(seq=sequences, dropped=st.integers(1, 5))
    def truncate(self, seq, dropped):
        if seq in self.tokens:
            length = max(len(self.tokens[seq]) - dropped, 0)
            self.cache.truncate(seq, length)
            del self.tokens[seq][length:]

    @rule(seq=sequences, dropped=st.integers(1, 4), tokens=st.lists(st.integers(0, 1), max_size=6))
    def redraft(self, seq, dropped, tokens):
        self.truncate(seq, dropped)
        self.append_and_write(seq, tokens, True)

    @rule(tokens=st.lists(st.integers(0, 1), max_size=12))
    def abandon(self, tokens):
        seq = self.new_name()
        with contextlib.suppress(CacheFull):
            self.cache.free(seq, written=self.cache.append(seq, tokens))

    @rule(seq=consumes(sequences))
    def free(self, seq):
        if self.tokens.pop(seq, None) is not None:
            self.cache.free(seq)

    @invariant()
    def sequences_are_those_of_the_model(self):
        assert len(self.cache) == len(self.tokens)
        for seq, tokens in self.tokens.items():
            assert self.cache.length(seq) == len(tokens)
            assert len(self.cache.pages(seq)) == -(-len(tokens) // self.cache.page_size)

    @invariant()
    def every_page_is_counted_once_for_each_owner(self):
        owners = Counter(page for seq in self.tokens for page in self.cache.pages(seq))
        held = [self.cache.ref_count(page) for page in range(self.cache.num_pages)]
        assert held == [owners[page] for page in range(self.cache.num_pages)]
        for seq in self.tokens:
            assert len(set(self.cache.pages(seq))) == len(self.cache.pages(seq))

    @invariant()
    def no_page_is_lost(self):
        cache, pool = self.cache, self.cache._pool
        unused = [*pool.blank, *pool.evictable]
        assert sorted(unused) == [p for p in range(cache.num_pages) if not cache.ref_count(p)]
        assert cache.num_free_pages == len(unused)
        assert {page: digest for digest, page in pool.page_of_hash.items()} == pool.hash_of_page
        assert set(pool.evictable) <= set(pool.hash_of_page)

    @invariant()
    def a_page_is_found_by_what_it_holds(self):
        for digest, page in self.cache._pool.page_of_hash.items():
            assert torch.equal(
                self.cache.kv_cache[0, 0, page, 0, :, 0], self.contents_of_hash[digest]
            )
        for seq, tokens in self.tokens.items():
            assert self.cache._sequences[seq].tokens in (None, tokens)

    @invariant()
    def contents_are_read_back_through_the_block_table(self):
        seqs = sorted(self.tokens)
        batch = self.cache.batch(seqs, [len(self.tokens[seq]) for seq in seqs])
        for row, length, seq in zip(batch.block_table, batch.seqused_k, seqs, strict=True):
            pages = row[row >= 0].long()
            stored = self.cache.kv_cache[:, :, pages].movedim(3, 4).flatten(2, 3)[:, :, :length]
            expected = contents(self.tokens[seq])[:, None, None] * MARK[:, :, None]
            assert torch.equal(stored, expected.expand_as(stored))

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for seq in list(self.tokens):
            self.cache.free(seq)
        assert self.cache.num_free_pages == self.cache.num_pages


TestKVCache = KVCacheMachine.TestCase
IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
TestKVCache.settings = settings(
    derandomize=not IS_THOROUGH,
    deadline=None,
    max_examples=2000 if IS_THOROUGH else 100,
    stateful_step_count=30,
)
