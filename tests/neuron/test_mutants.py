"""The seeded faults of `mutants.py` still fit the backend; `make thorough-mutants` runs them."""

import collections

import mutants
import pytest

BACKEND = mutants.ROOT / "torch_paged_attn/backends/neuron"


@pytest.mark.parametrize("fault", mutants.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_one_place(fault):
    assert (BACKEND / fault.file).read_text().count(fault.old) == 1
    assert fault.new != fault.old


def test_names_tell_faults_apart():
    names = collections.Counter(fault.name for fault in mutants.FAULTS)
    assert set(names.values()) == {1}
