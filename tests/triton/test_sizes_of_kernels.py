"""Numbers that follow lengths are compiled into no kernel.

Triton compiles a kernel anew for a number that is 1, and for multiples of 16, unless the kernel
names it in `do_not_specialize`. That has an effect on numbers alone: the numbers of a group (a
tuple) are always specialised, whatever the kernel says of the group.
"""

import ast
import importlib
import inspect
import pkgutil
from typing import NamedTuple

import pytest

from torch_paged_attn.backends import triton as backend

# attributes that a number has in a kernel, too
OF_NUMBERS = {"to", "dtype"}


class Jitted(NamedTuple):
    """A function of Triton or Gluon: parameters, but for constants; those that are not specialised;
    and those of which it reads a field.
    """

    name: str
    parameters: list[str]
    not_specialised: set[str]
    groups: set[str]


def modules():
    for found in pkgutil.walk_packages(backend.__path__, f"{backend.__name__}."):
        yield importlib.import_module(found.name)


def jitted_in(module):
    # by the text: where the interpreter runs kernels, they do not say what is specialised
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            text = ast.unparse(decorator)
            if text.startswith(("triton.jit", "gluon.jit")):
                named = {x.arg: x.value for x in getattr(decorator, "keywords", ())}
                said = named.get("do_not_specialize")
                said = eval(ast.unparse(said), vars(module)) if said else ()
                yield jitted(node, module, set(said))


def jitted(node, module, said):
    parameters = [x.arg for x in node.args.args if "constexpr" not in str(_unparsed(x.annotation))]
    read = [x for x in ast.walk(node) if isinstance(x, ast.Attribute)]
    read = [x for x in read if isinstance(x.value, ast.Name) and x.attr not in OF_NUMBERS]
    name = f"{module.__name__.removeprefix(backend.__name__ + '.')}.{node.name}"
    return Jitted(name, parameters, said, {x.value.id for x in read} & set(parameters))


def _unparsed(annotation):
    return annotation and ast.unparse(annotation)


MODULES = [*modules()]
FUNCTIONS = [function for module in MODULES for function in jitted_in(module)]
KERNELS = [x for x in FUNCTIONS if x.name.endswith("_kernel")]
SIZES = {
    field
    for module in MODULES
    for name, x in vars(module).items()
    if name.endswith("Sizes") and isinstance(x, type)
    for field in x._fields
}


def test_the_walk_finds_kernels():
    assert len(KERNELS) > 30 and len(SIZES) > 20


@pytest.mark.parametrize(
    "function", [x for x in FUNCTIONS if x.not_specialised], ids=lambda x: x.name
)
def test_no_group_is_named_as_not_specialised(function):
    assert function.not_specialised <= set(function.parameters)
    found = function.not_specialised & function.groups
    assert not found, "Triton specialises the numbers of a group all the same"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda x: x.name)
def test_sizes_are_numbers_that_are_not_specialised(kernel):
    assert "sizes" not in kernel.parameters, "sizes have to come one by one"
    assert {x for x in kernel.parameters if x in SIZES} <= kernel.not_specialised
