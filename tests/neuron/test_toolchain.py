"""Without Neuron's packages the backend imports, and says what is missing."""

from pathlib import Path

import pytest

import torch_paged_attn

CODE = """
import sys, types
{before}
from torch_paged_attn.backends.neuron import BACKEND
print(BACKEND.unsupported())
"""


# what PyPI has under Neuron's names: importing it raises
STUBS = """
import importlib.abc

class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('nki', 'neuronxcc', 'torch_neuronx'):
            return importlib.machinery.ModuleSpec(name, self)
    def exec_module(self, module):
        raise ImportError('WRONG PACKAGE')

sys.meta_path.insert(0, Stubs())
"""


@pytest.fixture
def say(forks):
    root = str(Path(torch_paged_attn.__file__).parent.parent)

    def say(before="", emulate="0"):
        code = CODE.format(before=before)
        return forks.run(code, root, PAGED_ATTN_NEURON_EMULATE=emulate)

    return say


def test_says_where_the_emulator_is(say):
    assert "tools/ of torch_paged_attn's repository on PYTHONPATH" in say(emulate="1")


def test_says_how_to_get_nki(say):
    assert "install nki" in say("sys.modules['nki'] = None")


def test_knows_the_old_sdk(say):
    before = "sys.modules['nki'] = None; "
    before += "sys.modules['neuronxcc'] = sys.modules['neuronxcc.nki'] = types.ModuleType('x')"
    assert "SDK 2.29 or newer" in say(before)


def test_knows_a_stranger_of_the_same_name(say):
    assert "without nki.jit is installed" in say("sys.modules['nki'] = types.ModuleType('nki')")


def test_pypis_stubs_are_not_taken_for_the_packages(say):
    assert "PyPI's package of that name is a stub" in say(STUBS)
