"""The seeds of dropout, drawn from torch's generator."""

import torch
from torch import Tensor


def drawn_rng_state(device: torch.device) -> Tensor:
    """A random `rng_state` (2,) for `flash_varlen`. Nothing is read on the host.

    In a graph whose backward may compute the draw again, it is a graph break: torch would draw
    another seed there, so that the gradients are those of another mask (pytorch issue 190758). The
    seed is then an input of the graph that follows, which saves it.
    """
    if torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
        # it imports torch._dynamo, which takes seconds where nothing else does
        from torch_paged_attn.integrations import _dropout_graphs

        if _dropout_graphs.may_be_drawn_again():
            return _dropout_graphs.draw_outside_graphs(device)
    return draw(device)


def draw(device: torch.device) -> Tensor:
    """A random `rng_state`, wherever it is called."""
    return torch.randint(2**62, (2,), dtype=torch.int64, device=device)
