"""How torch.compile treats the draw of dropout's seed. Imported for calls that it traces alone,
because this imports torch._dynamo.
"""

import torch
from torch._functorch import config
from torch.fx import traceback

from torch_paged_attn.integrations._dropout import draw

draw_outside_graphs = torch.compiler.disable(
    draw,
    reason="dropout's seed is drawn outside the graph, because with activation_memory_budget,"
    " aggressive_recomputation or ban_recompute_not_in_allowlist=False the backward would draw"
    " another one. For fullgraph=True draw rng_state before the compiled function and call"
    " torch_paged_attn.flash_varlen with it",
)


@torch.compiler.assume_constant_result
def may_be_drawn_again() -> bool:
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
