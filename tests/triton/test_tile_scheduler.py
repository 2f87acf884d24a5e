"""Tiles of a ragged batch, longest first: counted by the kernel, sorted here."""

import pytest
import torch

from torch_paged_attn.backends.triton.hopper.tile_scheduler import (
    Lengths,
    TileOptions,
    plan_tile_list,
)
from torch_paged_attn.testing.inputs import cumulative

BATCHES = {
    "ragged": [(3, 3), (0, 0), (70, 70), (1, 1), (129, 129), (300, 300), (513, 513)],
    "mixed": [(1, 300), (130, 130), (37, 128), (0, 17), (5, 69), (200, 900), (20, 5), (4, 0)],
    "many": [(i * 37 % 200, i * 53 % 300) for i in range(70)],
    "one": [(64, 64)],
    "none": [],
}


@pytest.mark.parametrize("is_aligned", (False, True))
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("padding", (0, 70))
@pytest.mark.parametrize("name", BATCHES)
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


@pytest.mark.parametrize("is_cut", (False, True))
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("name", BATCHES)
def test_every_tile_of_keys_once_and_the_longest_first(name, is_causal, is_cut, device):
    seqs, tokens, block_n, padding = BATCHES[name], 64, 32, 70 * is_cut
    query_lens, spans = [q for q, _ in seqs], [k for _, k in seqs]
    key_lens = [k * (b % 3) // 2 if is_cut else k for b, k in enumerate(spans)]
    cu_seqlens_q, cu_seqlens_k = cumulative(query_lens), cumulative(spans)
    seqused_k = torch.tensor(key_lens, dtype=torch.int32) if is_cut else None
    lengths = (None if x is None else x.to(device) for x in (cu_seqlens_q, cu_seqlens_k, seqused_k))
    options = TileOptions(False, is_causal, False, TOKENS=tokens, BLOCK_N=block_n, OF_KEYS=True)
    total_k = sum(spans) + padding
    list_tiles = plan_tile_list(len(seqs), sum(query_lens), total_k, options, device)
    order = list_tiles(Lengths(*lengths)).cpu()

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
