"""A work list shows every row the keys it sees, each once, whatever the tiles."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_paged_attn.attention_call import BlockLayout
from torch_paged_attn.backends.neuron import work_list
from torch_paged_attn.backends.neuron.work_list import Batch, KeyTile, build_work_lists

TILE_Q, GRAIN = 8, 4
# the last as a gather of two heads has it
TILES = ([KeyTile(16, GRAIN, 4)], [KeyTile(32, GRAIN, 2), KeyTile(16, GRAIN, 4, share=2)])


@st.composite
def layouts(draw, batch):
    q_block, k_block = draw(st.sampled_from((4, 8, 16))), draw(st.sampled_from((4, 8, 16)))
    heads = draw(st.integers(1, 2))
    rows, cols = -(-70 // q_block), -(-70 // k_block)
    seed = draw(st.integers(0, 2**16))
    outer = (batch, heads) if draw(st.booleans()) else (heads,)
    listed = torch.rand(*outer, rows, cols, generator=torch.Generator().manual_seed(seed)) < 0.4
    counts = listed.sum(-1).cumsum(-1)
    crow = torch.nn.functional.pad(counts, (1, 0))
    col = torch.zeros(*outer, int(crow.max()) + 1, dtype=torch.long)
    for where in torch.cartesian_prod(*(torch.arange(n) for n in (1, *outer))).tolist():
        flat = listed[tuple(where[1:])].nonzero()[:, 1].flip(0)
        flat = torch.cat([r.nonzero()[:, 0].flip(0) for r in listed[tuple(where[1:])]])
        col[tuple(where[1:])][: len(flat)] = flat
    return listed, BlockLayout(crow, col, q_block, k_block)


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(st.data())
def test_every_pair_that_is_visible_is_shown_once(data):
    seqs = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(-20, 30)), max_size=3))
    seqs = [(q, max(0, q + context)) for q, context in seqs]
    padding, group = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    listed, layout = None, None
    if seqs and data.draw(st.booleans()):
        listed, layout = data.draw(layouts(len(seqs)))
    windows = data.draw(st.tuples(*(st.sampled_from((-1, 0, 5)) for _ in range(2))))
    planes = 1 if listed is None else listed.shape[-3]
    bounds = torch.tensor([0, *(q for q, _ in seqs)]).cumsum(0)
    total = int(bounds[-1]) + padding
    key_lens = torch.tensor([k for _, k in seqs], dtype=torch.long)
    batch = Batch(bounds, key_lens, total, *windows, group, planes, layout, TILE_Q)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work_list, "LAUNCH_COLUMNS", data.draw(st.sampled_from((0, 8192))))
        lists = build_work_lists(batch, data.draw(st.sampled_from(TILES)), (1, 2, 4))

    shown = torch.zeros(planes, total, group, 100, dtype=torch.long)
    stored = torch.zeros(planes, total, group, dtype=torch.long)
    for work in lists:
        # the runs of heads that share a gather stay within pages, and blocks that hold them
        longest = GRAIN * work.share
        if layout is None or layout.k_block_size % longest == 0:
            assert (work.keys[:, :: work.share] % longest == 0).all()
        keys = (work.keys[..., None] + torch.arange(GRAIN)).flatten(1)
        for item, stack in enumerate(work.stack.tolist()):
            at = work.plane[stack], work.token[stack], work.member[stack]
            column = torch.arange(work.tile_k)
            start, stop = work.row_start[item], work.row_stop[item]
            sees = (column >= start[..., None]) & (column < stop[..., None])
            assert not (sees & ~work.is_row[stack][..., None]).any()
            # every column between the bounds is seen by a row, no other is
            anybody = sees.flatten(0, 1).any(0)
            inside = (column >= work.key_start[item]) & (column < work.key_stop[item])
            assert torch.equal(anybody, inside)
            level, row, c = sees.nonzero().unbind(1)
            index = (at[0].expand(len(c)), at[1][level, row], at[2][level, row], keys[item][c])
            shown.index_put_(index, torch.tensor(1), accumulate=True)
            if work.is_last[item]:
                level, row = work.is_row[stack].nonzero().unbind(1)
                index = at[0].expand(len(row)), at[1][level, row], at[2][level, row]
                stored.index_put_(index, torch.tensor(1), accumulate=True)
    assert (stored == 1).all()

    expected = torch.zeros_like(shown)
    for b, (query_len, key_len) in enumerate(seqs):
        position = key_len - query_len + torch.arange(query_len)[:, None]
        key = torch.arange(key_len)
        sees = torch.ones(planes, query_len, key_len, dtype=torch.bool)
        sees &= (windows[0] < 0) | (key >= position - windows[0])
        sees &= (windows[1] < 0) | (key <= position + windows[1])
        if listed is not None:
            blocks = listed[b] if listed.dim() == 4 else listed
            row = position[:, 0].div(layout.q_block_size, rounding_mode="floor")
            sees &= blocks[:, row.clamp(min=0)][..., key // layout.k_block_size]
            sees &= position >= 0
        expected[:, bounds[b] : bounds[b + 1], :, :key_len] = sees[:, :, None]
    assert torch.equal(shown, expected)
