"""Whether something sees the operators that are called: a profiler, a mode, a transform, a tracer.

Where nothing does, `append_and_attend` is called as a plain function: torch's dispatcher takes half
of its host time to box seventeen arguments and unbox them again. `repeated.py` does the same for
operators that may have gradients.
"""

from collections.abc import Callable
from typing import Any

import torch

# the number of active dispatch modes; a mode has to see every operator that is called
dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_profiled: Any = getattr(torch.autograd, "_profiler_enabled", lambda: True)
_transformed: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_traced: Any = getattr(torch._C, "_get_tracing_state", lambda: True)


def is_watched() -> bool:
    """Whether the operators of this thread have to go through torch's dispatcher."""
    return bool(dispatch_modes() or _profiled() or _transformed() or _traced())
