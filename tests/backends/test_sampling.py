"""The table of what runs names what there is, and a reason for each problem that it leaves out."""

import pytest
from runners import RUNNERS
from sampling import ALL, ALL_DIFFERENTIABLE, SAMPLES


@pytest.mark.parametrize("name", SAMPLES)
def test_table(name):
    assert name in RUNNERS
    for test, cases in SAMPLES[name].cases.items():
        if not test.startswith("write"):
            assert set(cases) <= set(ALL_DIFFERENTIABLE | ALL), test
    if name not in ("neuron-2", "neuron-4"):  # neuron-3 runs what they leave out
        lacks = set(RUNNERS[name].lacks())
        there_are = {n for n, p in ALL.items() if not p.optional & lacks}
        left_out = there_are - set(SAMPLES[name].cases.get("agrees", ALL))
        assert left_out <= set(SAMPLES[name].like)
