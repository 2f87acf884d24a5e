"""Results of Triton's kernels by plans for sizes that a test has set."""

from dispatched import dispatched
from torch import Tensor

from torch_paged_attn.backends.triton import BACKEND
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.testing import Call


def planned_anew(call: Call) -> list[Tensor]:
    """The results of a call, on the CPU, by a plan that neither earlier calls left nor later ones
    find."""
    launch_cache.clear()
    args, options = dispatched(call.op, call.args)
    results = BACKEND.function(call.op)(*args, **options)
    launch_cache.clear()
    return [x.cpu() for x in results]
