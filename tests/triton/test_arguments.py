"""The groups in which the portable kernel takes its arguments."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from torch_paged_attn.backends.triton import portable
from torch_paged_attn.backends.triton.portable.common.groups import Pointers, Scalars, Sizes
from torch_paged_attn.backends.triton.portable.selected.backward_kernels import UnitSizes
from torch_paged_attn.backends.triton.portable.selected.keys import SelectedSizes
from torch_paged_attn.backends.triton.portable.selected.token_rows import RunSizes

# a few functions work on a tile, its rows and what was loaded for it
MOST_PARAMETERS = 9
SIZES = {*SelectedSizes._fields, *UnitSizes._fields, *RunSizes._fields}
FILES = sorted(Path(portable.__file__).parent.rglob("*.py"))

# kernels: Triton wants sizes one by one, and a node of a graph everything
KERNELS = (
    *("_attention_fwd_kernel", "_graph_attention_fwd_kernel"),
    *("_attention_dq_kernel", "_attention_dkdv_kernel", "_attention_dbias_kernel"),
    *("_top_units_kernel", "_count_units_kernel"),
)


def device_functions(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and any(
            "triton.jit" in ast.unparse(d) for d in node.decorator_list
        ):
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_device_functions_take_groups(path):
    for function in device_functions(path):
        names = [a.arg for a in function.args.args]
        # dimensions and formats of a tile are no arguments at run time; sizes come one by one
        at_run_time = [n for n in names if not n.isupper() and n not in SIZES]
        assert function.name in KERNELS or len(at_run_time) <= MOST_PARAMETERS, function.name


def source(kernel):
    return inspect.getsource(kernel.fn)


def test_kernels_list_the_fields_of_groups():
    from torch_paged_attn.backends.triton.portable.forward import graph_kernel
    from torch_paged_attn.backends.triton.portable.forward import kernel as attention_kernel

    eager = list(inspect.signature(attention_kernel._attention_fwd_kernel.fn).parameters)
    assert eager == ["pointers", "strides", *Sizes._fields, "scalars", "OPTIONS", "IS_DEPENDENT"]
    node = source(graph_kernel._graph_attention_fwd_kernel)
    listed = re.findall(r"named\(\s*((?:\"[^\"]*\"\s*)+)\)", node)
    pointers, scalars = ("".join(re.findall(r"\"([^\"]*)\"", text)).split() for text in listed)
    assert tuple(pointers) == Pointers._fields and set(scalars) == set(Scalars._fields)
