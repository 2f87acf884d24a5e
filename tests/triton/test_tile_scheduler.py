"""Tiles of a ragged batch, longest first: counted by the kernel, sorted here."""

import collections
import itertools

import pytest
import torch
from covering import every_row

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.backward_preprocess import plan_statistics
from torch_paged_attn.backends.triton.common.key_tiles import KeyTiles
from torch_paged_attn.backends.triton.hopper.schedule.piece_plan import Chip
from torch_paged_attn.backends.triton.hopper.schedule.tile_scheduler import (
    Lengths,
    TileOptions,
    plan_tile_list,
)
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.testing.inputs import cumulative

BATCHES = {
    "ragged": [(3, 3), (0, 0), (70, 70), (1, 1), (129, 129), (300, 300), (513, 513)],
    "mixed": [(1, 300), (130, 130), (37, 128), (0, 17), (5, 69), (200, 900), (20, 5), (4, 0)],
    "many": [(i * 37 % 200, i * 53 % 300) for i in range(40)],
    "one": [(64, 64)],
    "none": [],
}


@pytest.mark.parametrize(
    ("name", "padding", "is_causal", "is_aligned"),
    every_row(3, itertools.product(BATCHES, (0, 70), (False, True), (False, True))),
)
def test_every_tile_once_and_the_longest_first(name, padding, is_causal, is_aligned, device):
    seqs, tokens, block_n = BATCHES[name], 32, 64
    query_lens, key_lens = [q for q, _ in seqs], [k for _, k in seqs]
    cu_seqlens_q, cu_seqlens_k = cumulative(query_lens), cumulative(key_lens)
    total_q = sum(query_lens) + padding
    lengths = (*(x.to(device) for x in (cu_seqlens_q, cu_seqlens_k)), None)
    options = TileOptions(False, is_causal, is_aligned, TOKENS=tokens, BLOCK_N=block_n)
    list_tiles = plan_tile_list(len(seqs), total_q, sum(key_lens), options, device)
    order = list_tiles(Lengths(*lengths)).cpu()

    expected = []
    for b, (query_len, key_len) in enumerate([*seqs, (padding, 0)]):
        k_start = int(cu_seqlens_k[b]) if b < len(seqs) else 0
        past = key_len - query_len
        lead = past % tokens if is_aligned else 0
        for first in range(-lead, query_len, tokens):
            stop_token = min(first + tokens, query_len)
            entry = (max(first, 0), int(cu_seqlens_q[b]), query_len, k_start, key_len, stop_token)
            stop = min(key_len, past + first + tokens) if is_causal else key_len
            if query_len > 0:
                expected.append((-max(stop, 0) // block_n, (b, *entry)))
    # by minus the tiles of keys; equal ones in the order of the batch
    expected = [entry for _, entry in sorted(expected, key=lambda e: (e[0], e[1][:2]))]
    assert order[0, :2].tolist() == [0, len(expected)]
    assert [tuple(e) for e in order[1 : 1 + len(expected), :7].tolist()] == expected


@pytest.mark.parametrize("is_causal", (False, True))
def test_queries_and_keys_that_lie_elsewhere(is_causal, device):
    """Before all keys, among them and behind them; keys that sequences share."""
    queries, keys, tokens, block_n = (100, 70, 64, 1, 129, 40), (300, 90, 64, 500, 0, 129), 32, 64
    positions, starts = (250, -50, 90, 3, 7, 0), (0, 290, 0, 1, 500, 371)
    cu_seqlens_q = cumulative(queries)
    given = [torch.tensor(x, dtype=torch.int32, device=device) for x in (keys, starts, positions)]
    options = TileOptions(False, is_causal, False, TOKENS=tokens, BLOCK_N=block_n)
    list_tiles = plan_tile_list(len(queries), sum(queries), 501, options, device)
    order = list_tiles(Lengths(cu_seqlens_q.to(device), None, *given)).cpu()

    expected = []
    for b, rows in enumerate(zip(queries, keys, starts, positions, strict=True)):
        query_len, key_len, start, position = rows
        for first in range(0, query_len, tokens):
            last = min(first + tokens, query_len)
            where = int(cu_seqlens_q[b]), key_len - position, start, key_len, last
            stop = min(key_len, position + first + tokens) if is_causal else key_len
            expected.append((-(-max(stop, 0) // block_n), (b, first, *where)))
    expected = [entry for _, entry in sorted(expected, key=lambda e: (-e[0], e[1][:2]))]
    assert [tuple(e) for e in order[1 : 1 + len(expected), :7].tolist()] == expected


CUT = {
    # queries and keys
    "one": [(100, 5000)],
    "few": [(70, 5000), (1, 3000), (2, 4500)],
    "decodes": [(1, 900 + 700 * i) for i in range(40)],
    "chunk": [(1, 4000)] * 40 + [(500, 6000)],
    "much": [(300, 6000)] * 9,
}


@pytest.mark.parametrize(
    ("units_per_tile", "kv_heads", "name"),
    every_row(2, ((*heads, name) for heads in ((1, 1), (8, 8), (28, 4)) for name in CUT)),
)
def test_every_piece_once_and_the_longest_first(name, units_per_tile, kv_heads, device):
    seqs = CUT[name]
    tokens, block_n, most_parts, room = 32, 128, 264, 528
    query_lens, key_lens = [q for q, _ in seqs], [k for _, k in seqs]
    cu_seqlens_q = cumulative(query_lens)
    used = cumulative(key_lens).diff()
    options = TileOptions(
        True, True, False, TOKENS=tokens, BLOCK_N=block_n, MOST_PARTS=room, COUNTERS=2 * room,
    )  # fmt: skip
    chip = Chip(132, units_per_tile, kv_heads, 2**30, 1.0, 1.0, 0.3, 0.75, 0.75)
    sizes = len(seqs), sum(query_lens), max(key_lens)
    list_tiles = plan_tile_list(*sizes, options, device, chip, most_parts)
    order = list_tiles(Lengths(cu_seqlens_q.to(device), None, used.to(device))).cpu()

    assert order.flatten()[8 : 8 + 2 * room].eq(0).all()
    claimed, count = order[0, :2].tolist()
    assert claimed == 0
    entries = order[1 + 2 * room // 8 :][:count].tolist()
    pieces, costs, parts = collections.defaultdict(list), [], []
    for b, first, _, query_len, _, key_len, stop, word in entries:
        first_part, piece, of = word >> 16, word >> 8 & 255, word & 255
        pieces[b, first].append((piece, of))
        visited = -(-(key_len - query_len + min(first + tokens, query_len)) // block_n)
        costs.append(-(-visited // of))
        assert stop == min(first + tokens, query_len)
        if of > 1:
            parts.append(first_part + piece)
    assert set(pieces) == {(b, i) for b, n in enumerate(query_lens) for i in range(0, n, tokens)}
    for found in pieces.values():
        assert sorted(found) == [(i, found[0][1]) for i in range(found[0][1])]
    # tiles are listed by where they end, to the next tile: their last keys may be a few short
    assert all(a >= b - 1 for a, b in itertools.pairwise(costs))
    assert len(set(parts)) == len(parts)
    assert all(part < len(parts) for part in parts)
    assert len(parts) * units_per_tile <= most_parts
    if name == "one" and units_per_tile == 1:
        assert len(parts) > 4


@pytest.mark.parametrize("window", (2**30, 600))
@pytest.mark.parametrize("units_per_tile", (1, 200))
def test_pieces_that_are_stretches_begin_at_the_same_keys(units_per_tile, window, device):
    """Of few tiles; where tiles fill the chip, they are whole."""
    seqs, tokens, block_n, most_parts = [(70, 5000), (1, 3000), (2, 900)], 32, 128, 264
    cu_seqlens_q = cumulative([q for q, _ in seqs])
    used = torch.tensor([k for _, k in seqs], dtype=torch.int32)
    options = TileOptions(
        True, True, False, TOKENS=tokens, BLOCK_N=block_n, MOST_PARTS=most_parts,
        COUNTERS=2 * most_parts, STRETCH=256,
    )  # fmt: skip
    chip = Chip(132, units_per_tile, 1, window, 1.0, 1.0, 0.3, 0.75, 0.75)
    list_tiles = plan_tile_list(len(seqs), 73, 5000, options, device, chip)
    order = list_tiles(Lengths(cu_seqlens_q.to(device), None, used.to(device))).cpu()
    pieces, parts = collections.defaultdict(list), []
    for b, first, *_, word in order[1 + 2 * most_parts // 8 :][: order[0, 1]].tolist():
        piece, number = word >> 8 & 255, word & 255
        pieces[b, first].append((piece, number))
        parts += [(word >> 16) + piece] * (number > 1)
    # keys from 4096 on lie in stretches of 512
    starts = [*range(0, 4096, 256), *range(4096, 8192, 512)]
    for (b, _), found in pieces.items():
        query_len, key_len = seqs[b]
        seen_from = max(key_len - query_len - window, 0)
        ends = [*starts[1:], 8192]
        seen = [s for s, end in zip(starts, ends, strict=True) if s < key_len and end > seen_from]
        # a tile is cut in all stretches that it may see, or not at all
        number = found[0][1]
        assert number in ((1, len(seen)) if units_per_tile == 1 else (1,))
        assert sorted(found) == [(i, number) for i in range(number)]
        assert [i for i, _ in found] == sorted((i for i, _ in found), reverse=True)
    assert len(pieces) == 5 and bool(parts) == (units_per_tile == 1)
    assert len(set(parts)) == len(parts) and all(part < len(parts) for part in parts)


@pytest.mark.parametrize("is_cut", (False, True))
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("name", BATCHES)
def test_every_tile_of_keys_once_and_the_longest_first(name, is_causal, is_cut, device):
    seqs, tokens, block_n, padding = BATCHES[name], 64, 32, 70 * is_cut
    query_lens, spans = [q for q, _ in seqs], [k for _, k in seqs]
    key_lens = [k * (b % 3) // 2 if is_cut else k for b, k in enumerate(spans)]
    cu_seqlens_q, cu_seqlens_k = cumulative(query_lens), cumulative(spans)
    seqused_k = torch.tensor(key_lens, dtype=torch.int32) if is_cut else None
    q, k = (torch.zeros(n, 1, 16, device=device) for n in (sum(query_lens), sum(spans) + padding))
    lse = torch.zeros(1, q.shape[0], device=device)
    lengths = [None if x is None else x.to(device) for x in (cu_seqlens_q, cu_seqlens_k, seqused_k)]
    forward = AttentionCall.flash_varlen(q, k, k, *lengths[:2], 0, 0, lengths[2])
    call = BackwardCall(forward, q, None, q, lse)
    make = plan_statistics(call, key_tiles=KeyTiles(tokens, block_n, is_causal))
    *_, made = make(q, None, q, lse, None, *lengths)
    assert made is not None
    order = made.cpu()

    expected = []
    rows = zip([*query_lens, 0], [*key_lens, 0], [*spans, padding], strict=True)
    for b, (query_len, key_len, span) in enumerate(rows):
        for first in range(0, span, tokens):
            seen_from = max(first - (key_len - query_len), 0) if is_causal else 0
            visited = max(query_len - seen_from, 0) if first < key_len else 0
            starts = int(cu_seqlens_q[b]), query_len, int(cu_seqlens_k[b]), key_len
            expected.append((-visited // block_n, (b, first, *starts, min(first + tokens, span))))
    expected = [entry for _, entry in sorted(expected, key=lambda e: (e[0], e[1][:2]))]
    assert order[0, :2].tolist() == [0, len(expected)]
    assert [tuple(e) for e in order[1 : 1 + len(expected), :7].tolist()] == expected
