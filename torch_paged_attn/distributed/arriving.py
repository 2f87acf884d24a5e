"""Attention for some heads while the keys of the other heads are still being copied."""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.distributed.shared_keys import Arriving
from torch_paged_attn.ops import flash_varlen
from torch_paged_attn.ops.backend import serving_device

# argument -> the dimension that has one entry per query head
OF_HEADS = {"alibi_slopes": -1, "sinks": 0, "attn_bias": 0}

# the number of active dispatch modes; a mode has to see every operator that is called
_dispatch_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def attend_as_they_come(
    q: Tensor, parts: list[Arriving], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """`flash_varlen(q, k, v, **options)` if the keys and values come in parts, each of some KV
    heads.

    On GPUs each part has a kernel on the part's own stream, which starts when the part's keys have
    been copied; kernels of several parts may run at the same time. The current stream waits for
    all.
    """
    if len(parts) == 1:
        return flash_varlen(q, parts[0].k, parts[0].v, **options)
    module = torch.get_device_module(q.device)
    here = module.current_stream(q.device)
    group = q.shape[1] // parts[-1].heads.stop
    out = q.new_empty(*q.shape[:2], parts[0].v.shape[2])
    lse = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for part in parts:
        own = slice(group * part.heads.start, group * part.heads.stop)
        given = options | {
            name: x.narrow(dim, own.start, own.stop - own.start)
            for name, dim in OF_HEADS.items()
            if (x := options.get(name)) is not None and x.shape[dim] == q.shape[1]
        }
        given |= {"q": q[:, own], "k": part.k, "v": part.v}
        with module.stream(part.stream):
            _attend(given, out[:, own], lse[own])
    for part in parts:
        if part.stream is not here:
            here.wait_stream(part.stream)
    return out, lse


def _attend(given: dict[str, Any], out: Tensor, lse: Tensor) -> None:
    """Write the results of `flash_varlen(**given)` to `out` and `lse`."""
    is_seen = _dispatch_modes() > 0 or torch.is_autocast_enabled(out.device.type)
    backend, _ = serving_device(out.device)
    if not is_seen and backend is not None and backend.attend_heads(given, out, lse):
        return
    found = flash_varlen(**given)
    out.copy_(found[0])
    lse.copy_(found[1])
