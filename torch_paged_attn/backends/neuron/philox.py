"""The words that dropout shares among all positions: keys of the rounds, offset, threshold."""

import torch
from torch import Tensor

from torch_paged_attn.backends.neuron.kernels.philox import ROUNDS

WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def philox_words(rng_state: Tensor, dropout_p: float) -> Tensor:
    """`(1, NUM_WORDS)` int32 with the bits of unsigned words; nothing is read on the host."""
    seed, offset = rng_state[0], rng_state[1]
    halves = torch.stack([seed & MASK, seed >> 32 & MASK])
    steps = torch.arange(ROUNDS, device=rng_state.device)[:, None]
    weyl = torch.tensor(WEYL, device=rng_state.device)
    threshold = torch.full((1,), int(dropout_p * 2.0**32), device=rng_state.device)
    words = torch.cat(
        [((halves + steps * weyl) & MASK).flatten(), (offset & MASK)[None], threshold]
    )
    # bits of 32: what is 2**31 or more is negative
    return torch.where(words > MASK >> 1, words - (MASK + 1), words).to(torch.int32)[None]
