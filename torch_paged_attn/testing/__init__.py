"""What a backend is tested with: named problems, their inputs, one accuracy rule."""

from torch_paged_attn.testing.accuracy import Truth, assert_accurate, assert_close_as_baseline
from torch_paged_attn.testing.inputs import Call, build
from torch_paged_attn.testing.problems import PROBLEMS, Layout, Problem

__all__ = [
    "PROBLEMS",
    "Call",
    "Layout",
    "Problem",
    "Truth",
    "assert_accurate",
    "assert_close_as_baseline",
    "build",
]
