"""Philox-4x32-10 against the known answers of Random123 (kat_vectors)."""

import pytest
import torch

from torch_paged_attn.reference.philox import dropout_keep, philox_4x32

ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_known_answers(counter, key, words):
    got = philox_4x32(tuple(torch.tensor(c) for c in counter), key)
    assert tuple(int(w) for w in got) == words


def test_the_counter_is_as_documented():
    seed, offset, sequence, head, row, column = -3, 2**33 + 5, 2, 1, 6, 10
    state = torch.tensor([seed, offset])
    counter = (column // 4, row, sequence << 16 | head, 5)
    words = philox_4x32(tuple(torch.tensor(c) for c in counter), (2**32 - 3, ONES))
    word = int(words[column % 4])
    for p in (word / 2**32, (word + 1) / 2**32):
        keep = dropout_keep(state, p, sequence, head + 1, row + 1, column + 1)
        assert bool(keep[head, row, column]) == (word >= int(p * 2**32))


def test_a_draw_depends_on_nothing_but_its_coordinates():
    state = torch.tensor([1, 2])
    small = dropout_keep(state, 0.5, 3, 2, 5, 7)
    large = dropout_keep(state, 0.5, 3, 4, 9, 16)
    assert torch.equal(small, large[:2, :5, :7])
    assert not torch.equal(large, dropout_keep(state, 0.5, 2, 4, 9, 16))
    assert abs(dropout_keep(state, 0.1, 0, 8, 64, 64).float().mean() - 0.9) < 0.01


def test_a_part_of_a_larger_call_drops_what_the_whole_drops():
    state = torch.tensor([1, 2])
    whole = dropout_keep(state, 0.5, 3, 6, 20, 40)
    for head, row, column in ((0, 0, 0), (2, 7, 13), (1, 3, 16)):
        base = torch.tensor([1, 2, head, row, column])
        part = dropout_keep(base, 0.5, 3, 3, 5, 11)
        assert torch.equal(part, whole[head : head + 3, row : row + 5, column : column + 11])
