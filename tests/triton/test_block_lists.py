"""Lists of blocks for tiles of several layout rows: made by the kernel, made again here."""

import dataclasses

import pytest

from torch_paged_attn.attention_call import BlockLayout
from torch_paged_attn.backends.triton.hopper.schedule.block_lists import (
    SPAN,
    plan_block_lists,
    shape_of_lists,
)
from torch_paged_attn.testing import PROBLEMS, Layout, build

KEYS = 900

LAYOUTS = {
    "equal": Layout(64, 64, "all", density=0.4),
    "fine": Layout(16, 16, "kv", density=0.2),
    "batched": Layout(32, 128, batched=True, density=0.5),
    "wide": Layout(128, 256, density=0.7),
    "rows_of_two_tiles": Layout(256, 32, density=0.5),
    "empty": Layout(64, 64, density=0.0),
}


def expected_lists(layout, heads, group, positions, keys, causal):
    """(pieces, rows) that one group of rows of every head lists, by piece."""
    rows = positions // layout.q_block_size
    pieces = layout.k_block_size // keys
    crow, col = layout.crow_indices[heads], layout.col_indices[heads]
    seen = {}
    for r in range(rows):
        row = group * rows + r
        if row + 1 >= crow.numel():
            break
        for c in col[crow[row] : crow[row + 1]].tolist():
            for piece in range(c * pieces, (c + 1) * pieces):
                is_past = piece * keys >= (row + 1) * layout.q_block_size
                if piece * keys < KEYS and not (causal and is_past):
                    seen[piece] = seen.get(piece, 0) | 1 << r
    return sorted(seen.items())


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("tokens, block_n", ((128, 128), (32, 64)))
@pytest.mark.parametrize("name", LAYOUTS)
def test_lists_what_the_rows_of_a_tile_list(name, tokens, block_n, causal, device):
    # the longest sequence has more keys than there may be: what lies past them is left out
    problem = dataclasses.replace(
        PROBLEMS["blocksparse/shared_layout/f32"], seqs=((1000, 0), (9, 0)), layout=LAYOUTS[name]
    )
    args = build(problem).args
    names = [field.name for field in dataclasses.fields(BlockLayout)]
    layout = BlockLayout(**{n: args[n] for n in names})
    moved = BlockLayout(
        layout.crow_indices.to(device),
        layout.col_indices.to(device),
        layout.q_block_size,
        layout.k_block_size,
    )
    positions, keys = shape_of_lists(layout.q_block_size, layout.k_block_size, tokens, block_n)
    assert keys == min(layout.k_block_size, block_n)
    assert positions == max(layout.q_block_size, tokens)

    build_lists = plan_block_lists(moved, positions, keys, KEYS, causal)
    entries, spans = (x.cpu() for x in build_lists(moved.crow_indices, moved.col_indices))
    assert spans.shape[2:] == (-(-KEYS // positions), SPAN.value)
    outer = layout.crow_indices.shape[:-1]
    for b in range(spans.shape[0]):
        for head in range(spans.shape[1]):
            for group in range(spans.shape[2]):
                start, count = spans[b, head, group].tolist()
                got = [(e >> 8, e & 255) for e in entries[start : start + count].tolist()]
                where = (b, head)[-len(outer) :]
                assert got == expected_lists(layout, where, group, positions, keys, causal)
