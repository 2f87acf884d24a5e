"""What the backend that answers for CPU tensors has of the arguments that a backend may lack: the
CPU's, or under PAGED_ATTN_NEURON_EMULATE=1 Neuron's.
"""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import example

from torch_paged_attn.ops.backend import serving_device
from torch_paged_attn.ops.lacking import OPTIONAL
from torch_paged_attn.testing import Problem

BACKEND, _ = serving_device(torch.device("cpu"))
HAS = frozenset(OPTIONAL) - frozenset(BACKEND.lacks)


def examples(*given: Problem) -> Callable[[Any], Any]:
    """Those for whose arguments the backend has kernels, as explicit examples of a property."""

    def add(test: Any) -> Any:
        for problem in given:
            if problem.optional.isdisjoint(BACKEND.lacks):
                test = example(problem)(test)
        return test

    return add
