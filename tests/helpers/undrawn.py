"""Calls of problems that nothing computes: to draw numbers takes most of what building takes."""

from unittest import mock

import torch

from torch_paged_attn.testing import Call, Problem, build, inputs


def build_undrawn(problem: Problem) -> Call:
    """`build`, with zeros for what is drawn of a normal distribution. Lengths, pages, lists and
    layouts are the problem's.
    """
    with mock.patch.object(inputs, "_randn", lambda generator, *shape: torch.zeros(shape)):
        return build(problem)
