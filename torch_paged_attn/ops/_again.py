"""Calls like one before, answered without the dispatcher.

On its way to a kernel in Python, a call spends as much time in the dispatcher as in the kernel. A
backend that knows calls again can be asked first: it answers if the dispatcher would come straight
to it with these tensors, under the modes that are on, and if it has planned such a call before.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# what is answered where nothing is known
UNKNOWN = object()

# asked at every call: looked up once
_function_modes: Any = torch._C._len_torch_function_stack
_dispatch_modes: Any = torch._C._len_torch_dispatch_stack
_profiler_enabled: Any = torch.autograd._profiler_enabled

Play = Callable[[str, tuple[Tensor | None, ...], dict[str, Any]], Any]
_play: Play | None = None


def ask_first(play: Play) -> None:
    """Have a backend's `play(op, tensors, options)` asked before the dispatcher. Tensors come in
    the schema's order, options without those that have their defaults.
    """
    global _play
    _play = play


def again(op: str, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> Any:
    """The results of a call like one before, or UNKNOWN. Whoever watches calls go by sees all."""
    if _play is None or _function_modes() or _dispatch_modes() or _profiler_enabled():
        return UNKNOWN
    return _play(op, tensors, options)
