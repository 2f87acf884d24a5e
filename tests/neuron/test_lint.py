"""The kernels stay in the language that NKI's front ends accept, and call what is documented."""

import ast
import contextlib
import importlib
import inspect
from pathlib import Path

import pytest
from nki_emulator import nisa, nl
from nki_emulator.lint import lint
from nki_emulator.signatures import (
    ISA,
    LANGUAGE,
    METHODS,
    NEWER,
    same_parameters,
)
from nki_emulator.tensor import NkiTensor

import torch_paged_attn

FOLDER = Path(torch_paged_attn.__file__).parent / "backends" / "neuron" / "kernels"
ENTRIES = "attention_kernel", "attention_backward_kernel"
KERNELS = sorted(path.name for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_clean(name):
    assert lint((FOLDER / name).read_text()) == []


@pytest.mark.parametrize("name", KERNELS)
def test_device_functions_take_groups(name):
    """A kernel's own tensors cannot be grouped: front ends look for them among its parameters."""
    for node in ast.walk(ast.parse((FOLDER / name).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name not in ENTRIES:
            assert len(node.args.args) <= 8, node.name


FAULTS = {
    "is": "if x is None:\n        pass",
    "keyword-only": None,
    "f-string": "y = f'{x}'",
    "while": "while x:\n        pass",
    "comprehension": "y = [i for i in range(3)]",
    "an operator on a tile": "t = nl.ndarray((1, 1), nl.float32)\n    y = t * 2",
    "something else than range": "for i in x:\n        pass",
    "nl.affine_range": "for i in nl.affine_range(3):\n        pass",
    "nisa.select": "nisa.select(x, x)",
    "unexpected keyword argument 'mask'": "nisa.tensor_copy(dst=x, src=x, mask=x)",
    "missing a required argument: 'src'": "nisa.tensor_copy(dst=x)",
    "which no kernel file defines": "print(x)",
    "unexpected keyword argument 'engine'": "nisa.activation(x, x, x, engine=x)",
    "a branch on t, which": "t = nl.ndarray((1, 1), nl.float32)\n    if t:\n        pass",
    "a branch on r, which": "r = nisa.register_alloc(1)\n    y = 1 if r == 2 else 3",
    "a branch on i, which": "def body(i):\n        if i == 0:\n            pass\n"
    "    nl.fori_loop(0, 2, body)",
    "an operator on a register": "r = nisa.register_alloc(1)\n    y = r + 1",
    "inner closes over a tile": "t = nl.ndarray((1, 1), nl.float32)\n"
    "    def inner():\n        nisa.memset(dst=t, value=0.0)\n    inner()",
    "body rebinds y": "y = 1\n    def body(i):\n        y = 2\n    nl.fori_loop(0, 2, body)",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_finds(fault):
    body = FAULTS[fault]
    source = f"def kernel(x):\n    {body}\n"
    if body is None:
        fault, source = "not plain", "def kernel(x, *, y):\n    return x\n"
    assert any(fault in found for found in lint(source)), lint(source)


CLASSES = {
    "something else than nl.NKIObject": "@dataclass\nclass A:\n    x: int",
    "derives from": "@dataclass\nclass A(nl.NKIObject, B):\n    x: int",
    "no plain @dataclass": "@dataclass(frozen=True)\nclass A(nl.NKIObject):\n    x: int",
    "else than fields": "@dataclass\nclass A(nl.NKIObject):\n    def f(self):\n        pass",
}


def test_shapes_are_known_to_a_branch():
    body = "t = nl.ndarray((1, 1), nl.float32)\n    if t.shape[0] == 1:\n        pass"
    assert lint(f"def kernel(x):\n    {body}") == []


@pytest.mark.parametrize("fault", CLASSES)
def test_finds_classes(fault):
    assert any(fault in found for found in lint(CLASSES[fault])), lint(CLASSES[fault])


def modules():
    """Each table with what must have it: the emulator, and the wheel where it is installed."""
    found = [(ISA, nisa), (LANGUAGE, nl), (METHODS, NkiTensor)]
    with contextlib.suppress(ImportError):  # what PyPI has raises
        found += [
            (table, importlib.import_module(name))
            for table, name in ((ISA, "nki.isa"), (LANGUAGE, "nki.language"))
        ]
    return found


@pytest.mark.parametrize("table, module", modules())
def test_signatures_are_the_documented_ones(table, module):
    for name, documented in table.items():
        found = inspect.signature(getattr(module, name))
        allowed = [documented]
        if table is ISA and module is not nisa:  # the emulator has what both releases have
            allowed.append(NEWER.get(name, documented))
        assert any(same_parameters(x, found) for x in allowed), f"{name}{found}"
