"""The table of what runs names what there is, and a reason for each problem that it leaves out."""

import pytest
from runners import RUNNERS
from sampling import LIKE, SAMPLES

from torch_paged_attn.testing import PROBLEMS


@pytest.mark.parametrize("name", SAMPLES)
def test_table(name):
    assert name in RUNNERS
    for test, cases in SAMPLES[name].cases.items():
        if not test.startswith("write"):
            assert set(cases) <= set(PROBLEMS), test
    if name in ("triton-interpreter", "tpu"):  # another neuron-N runs what one leaves out
        assert set(PROBLEMS) - set(SAMPLES[name].cases["agrees"]) <= set(LIKE)
