"""What tests of a backend use: named problems, their input tensors, and the accuracy rule."""

from torch_paged_attn.testing.accuracy import (
    Truth,
    assert_accurate,
    assert_as_right_as,
    assert_close_as_baseline,
    assert_rounded_alike,
    assert_same_in_float64,
)
from torch_paged_attn.testing.gradients import Gradients, assert_accurate_gradients
from torch_paged_attn.testing.inputs import Call, build
from torch_paged_attn.testing.invariance import assert_batch_invariant
from torch_paged_attn.testing.merging import MergeGradients, assert_accurate_merge_gradients
from torch_paged_attn.testing.problem import Layout, Problem, Selected
from torch_paged_attn.testing.problems import EXTENDED, PROBLEMS
from torch_paged_attn.testing.selected_problems import SELECTED, SELECTED_DIFFERENTIABLE
from torch_paged_attn.testing.training_problems import (
    DIFFERENTIABLE,
    EXTENDED_DIFFERENTIABLE,
    TRAINING,
)

__all__ = [
    "DIFFERENTIABLE",
    "EXTENDED",
    "EXTENDED_DIFFERENTIABLE",
    "PROBLEMS",
    "SELECTED",
    "SELECTED_DIFFERENTIABLE",
    "TRAINING",
    "Call",
    "Gradients",
    "Layout",
    "MergeGradients",
    "Problem",
    "Selected",
    "Truth",
    "assert_accurate",
    "assert_accurate_gradients",
    "assert_accurate_merge_gradients",
    "assert_as_right_as",
    "assert_batch_invariant",
    "assert_close_as_baseline",
    "assert_rounded_alike",
    "assert_same_in_float64",
    "build",
]
