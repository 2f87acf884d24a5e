"""What a backend is tested with: named problems, their inputs, one accuracy rule."""

from torch_paged_attn.testing.accuracy import Truth, assert_accurate, assert_close_as_baseline
from torch_paged_attn.testing.gradients import Gradients, assert_accurate_gradients
from torch_paged_attn.testing.inputs import Call, build
from torch_paged_attn.testing.problems import (
    DIFFERENTIABLE,
    EXTENDED,
    EXTENDED_DIFFERENTIABLE,
    PROBLEMS,
    TRAINING,
    Layout,
    Problem,
)

__all__ = [
    "DIFFERENTIABLE",
    "EXTENDED",
    "EXTENDED_DIFFERENTIABLE",
    "PROBLEMS",
    "TRAINING",
    "Call",
    "Gradients",
    "Layout",
    "Problem",
    "Truth",
    "assert_accurate",
    "assert_accurate_gradients",
    "assert_close_as_baseline",
    "build",
]
