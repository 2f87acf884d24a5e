"""Tiles of queries that programs of Hopper's forward find by their numbers, without a list."""

import random
from typing import Any, NamedTuple

import pytest
import torch
from scalar_gluon import Pointer, as_python

from torch_paged_attn.backends.triton.hopper.schedule.query_tiles import _visit_numbered
from torch_paged_attn.testing.inputs import cumulative

PROGRAMS = 3


class Given(NamedTuple):
    """What the functions read of a kernel's arguments."""

    pointers: Any
    sizes: Any
    scalars: Any


class Pointers(NamedTuple):
    cu_seqlens_q: Pointer
    seqused_k: Pointer
    counters: Pointer
    cu_seqlens_k: None = None


class Sizes(NamedTuple):
    batch: int
    total_q: int
    lists_per_head: int  # keys that the block table has room for


class Scalars(NamedTuple):
    num_heads: int


class Options(NamedTuple):
    ROW_GROUPS: int
    TOKENS: int
    PACKED_HEADS: int
    BLOCK_N: int = 64
    COUNTERS: int = 0
    HAS_LEFT: bool = False


def visits(queries, keys, padding, options, num_heads):
    """Of each program, the tiles that it visits: sequence, first token, the token after the last
    one, head. The first program claims all that is not taken in turns."""
    counters = torch.zeros(1, dtype=torch.int32)
    pointers = Pointers(
        Pointer(cumulative(queries)), Pointer(torch.tensor(keys)), Pointer(counters)
    )
    sizes = Sizes(len(queries), sum(queries) + padding, max(keys, default=0))
    params, found = Given(pointers, sizes, Scalars(num_heads)), []
    for program in range(PROGRAMS):
        mine = []

        def visit(at, tile, n, mine=mine, sizes=sizes):
            assert tile == n == len(mine)
            assert at.b == sizes.batch or at.key_len == keys[at.b]
            mine.append(tuple(map(int, (at.b, at.first_token, at.stop_token, at.head))))
            return n + 1

        run = as_python(_visit_numbered, program, PROGRAMS)
        assert run(params, visit, (), options) == len(mine)
        found.append(mine)
    assert counters.item() == 0  # as the next launch wants it
    return found


def tiles_of(queries, padding, options, num_heads):
    step, heads = options.ROW_GROUPS * options.TOKENS, num_heads // options.PACKED_HEADS
    return [
        (b, first, min(first + step, length), head)
        for b, length in enumerate([*queries, padding])
        for first in range(0, length, step)
        for head in range(heads)
    ]


LENGTHS = {
    "decodes": lambda r: 1,
    "draft tokens": lambda r: r.randint(1, 8),
    "some empty": lambda r: r.randint(0, 8),
    "chunks": lambda r: r.choice((1, 1, 3, 40, r.randint(1, 90))),
}


@pytest.mark.parametrize("padding", [0, 11])
@pytest.mark.parametrize("kind", LENGTHS)
def test_every_tile_is_visited_once(kind, padding):
    r = random.Random(f"{kind} {padding}")
    for batch in (1, 7, 20):
        options = Options(r.choice((1, 2)), r.choice((8, 9, 16)), r.choice((2, 4)))
        queries = [LENGTHS[kind](r) for _ in range(batch)]
        keys = [x + r.randint(0, 300) for x in queries]
        found = visits(queries, keys, padding, options, 4)
        every = sorted(tile for mine in found for tile in mine)
        assert every == tiles_of(queries, padding, options, 4)


@pytest.mark.parametrize("kind", ["decodes", "draft tokens"])
def test_programs_begin_with_a_tile_where_each_sequence_has_one(kind):
    """Numbers have no gaps then."""
    r = random.Random(kind)
    for batch in (3, 4, 129):  # a warp looks at 128 at a time
        options = Options(1, 8, 4)
        queries = [LENGTHS[kind](r) for _ in range(batch)]
        found = visits(queries, [300] * batch, 0, options, 4)
        firsts = [mine[0][0] for mine in found]
        assert firsts == [batch - 1, batch - 2, batch - 3]


def test_programs_take_alike_tiles_in_turns():
    """Claims take time, and find nothing that is shorter."""
    counts = [len(x) for x in visits([1] * 20, [900] * 13 + [840] * 7, 0, Options(1, 8, 4), 4)]
    assert counts == [7, 7, 6]
    counts = [len(x) for x in visits([1] * 20, [900] * 13 + [700] * 7, 0, Options(1, 8, 4), 4)]
    # seven turns, of which the last three are claimed
    assert counts == [12, 4, 4]


@pytest.mark.parametrize("longest, firsts", [(90, [0, 1, 2]), (30, [4, 4, 4])])
def test_decodes_come_before_a_chunk_if_one_of_them_has_the_most_keys(longest, firsts):
    keys = [20, 5, longest, 7, 80]
    found = visits([1, 1, 1, 1, 70], keys, 0, Options(1, 16, 4, BLOCK_N=8), 4)
    assert [mine[0][0] for mine in found] == firsts
    first_tokens = [first for b, first, *_ in found[0][1:] if b == 4]
    assert first_tokens == sorted(first_tokens, reverse=True)


def test_a_sequence_of_many_queries_is_visited_from_its_last_tile():
    """A causal sequence's longest tiles come first."""
    found = visits([100], [100], 0, Options(1, 16, 4), 4)
    firsts = [mine[0][1] for mine in found]
    assert firsts == sorted(firsts, reverse=True) and firsts[0] == 96
