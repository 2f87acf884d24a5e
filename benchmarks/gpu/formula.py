"""What attention is, for one sequence, in float32: what results are compared with."""

import torch


def formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    window: int = -1,
) -> torch.Tensor:
    """Attention in float32 of the newest queries (queries, heads, dim) of a sequence, of which
    keys and values (keys, heads, dim) are given; `window` keys are seen before a query's own.
    """
    position = k.shape[0] - q.shape[0] + torch.arange(q.shape[0], device=q.device)
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    column = torch.arange(k.shape[1], device=q.device)
    if causal:
        scores.masked_fill_(column > position[:, None], float("-inf"))
    if window >= 0:
        scores.masked_fill_(column < position[:, None] - window, float("-inf"))
    if sinks is None:
        return (scores.softmax(-1) @ v).transpose(0, 1)
    sink = sinks.float()[:, None, None].expand(-1, q.shape[1], 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return (weights @ v).transpose(0, 1)
