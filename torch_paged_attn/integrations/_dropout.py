"""The seeds of dropout, drawn from torch's generator."""

import torch
from torch import Tensor
from torch._functorch import config
from torch.fx import traceback


def drawn_rng_state(device: torch.device) -> Tensor:
    """A random `rng_state` (2,) for `flash_varlen`. Nothing is read on the host.

    In a graph whose backward may compute the draw again, it is a graph break: torch would draw
    another seed there, so that the gradients are those of another mask (pytorch issue 190758). The
    seed is then an input of the graph that follows, which saves it.
    """
    is_traced = torch.compiler.is_dynamo_compiling()
    if is_traced and torch.is_grad_enabled() and _may_be_drawn_again():
        return _draw_outside_graphs(device)
    return _draw(device)


def _draw(device: torch.device) -> Tensor:
    return torch.randint(2**62, (2,), dtype=torch.int64, device=device)


_draw_outside_graphs = torch.compiler.disable(
    _draw,
    reason="dropout's seed is drawn outside the graph, because with activation_memory_budget,"
    " aggressive_recomputation or ban_recompute_not_in_allowlist=False the backward would draw"
    " another one. For fullgraph=True draw rng_state before the compiled function and call"
    " torch_paged_attn.flash_varlen with it",
)


@torch.compiler.assume_constant_result
def _may_be_drawn_again() -> bool:
    """Whether the partitioner of the graph that is traced may move random numbers to the backward.
    Evaluated while the graph is traced.
    """
    if torch.compiler.is_exporting():  # asked here: torch 2.11 traces it as always true
        return False
    # since torch 2.13: the budget of a region, which torch keeps with the nodes that it traces
    key = getattr(traceback, "MEMORY_BUDGET_ANNOTATION_KEY", None)
    region = (traceback.current_meta.get("custom") or {}).get(key, 1.0)
    is_tight = config.activation_memory_budget < 1.0 or region < 1.0
    return is_tight or config.aggressive_recomputation or not config.ban_recompute_not_in_allowlist
