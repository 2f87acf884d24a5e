"""Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

The random numbers of dropout, the same on every backend. One call of Philox makes four 32-bit
words, for four neighbouring keys:

    key     = (seed mod 2**32, seed div 2**32)
    counter = (column // 4, row, sequence << 16 | head, offset)       each modulo 2**32

`row` and `column` count the sequence's queries and keys from 0; `head` is the query head. If
`rng_state` has five entries, the last three are added to `head`, `row` and `column`. Key `column`
uses output word `column % 4`, and is kept if that word is at least `floor(p * 2**32)`.
"""

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def _mulhilo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of the product of two 32-bit numbers, in int64."""
    low = a * (b & 0xFFFF)
    middle = a * (b >> 16) + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit output words of each counter, as four int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _mulhilo(MULTIPLIERS[0], c0)
        high1, low1 = _mulhilo(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + WEYL[0] & MASK, k1 + WEYL[1] & MASK
    return c0, c1, c2, c3


def dropout_keep(
    rng_state: Tensor, dropout_p: float, sequence: int, num_heads: int, query_len: int, key_len: int
) -> Tensor:
    """Bool `(num_heads, query_len, key_len)`: True where dropout keeps a probability."""
    seed, offset, *base = rng_state.tolist()
    first_head, first_row, first_column = base or (0, 0, 0)
    device, first_quad, skipped = rng_state.device, first_column // 4, first_column % 4
    quads = -(-(skipped + key_len) // 4)
    column = first_quad + torch.arange(quads, device=device).view(1, 1, -1)
    row = first_row + torch.arange(query_len, device=device).view(1, -1, 1)
    head = first_head + torch.arange(num_heads, device=device).view(-1, 1, 1)
    head = (sequence << 16 & MASK) | head
    offset_word = torch.tensor(offset & MASK, device=device).view(1, 1, 1)
    counter = torch.broadcast_tensors(column, row, head, offset_word)
    words = philox_4x32(counter, (seed & MASK, seed >> 32 & MASK))
    draws = torch.stack(words, -1).flatten(-2)[..., skipped : skipped + key_len]
    return draws >= int(dropout_p * 2.0**32)
