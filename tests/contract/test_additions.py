"""An argument that no backend supports, and an operator that no backend has, are refused by their
names, though no backend's files know them. Both are added to a copy of the package.
"""

import shutil
from pathlib import Path

import pytest

import torch_paged_attn

PACKAGE = Path(torch_paged_attn.__file__).parent
TOOLS = Path(__file__).parents[2] / "tools"

ARGUMENTS = """
import torch
import torch_paged_attn
from torch_paged_attn.attention_call import arguments
from torch_paged_attn.ops.backend import backends
from torch_paged_attn.selection_calls import arguments as of_mass
from torch_paged_attn.testing import DIFFERENTIABLE, PROBLEMS, SELECTED, build

NEW = {"new_tensor": torch.ones(1)}, {"new_number": 0.25}


def problem(op, of=PROBLEMS):
    return next(build(x) for x in of.values() if x.op == op and x.kv_dtype is None)


def refused(function, *args, **given):
    try:
        function(*args, **given)
    except NotImplementedError as error:
        print(error)


for op in ("flash_varlen", "blocksparse", "selected_attention"):
    given = problem(op, SELECTED if op == "selected_attention" else PROBLEMS).args
    function = getattr(torch_paged_attn, op)
    plain = function(**given)
    assert all(map(torch.equal, plain, function(**given | {"new_tensor": None, "new_number": 0.5})))
    for new in NEW:
        refused(function, **given | new)

# one that takes the arguments of another: it reads the places that it knows
given = problem("selected_attention", SELECTED).args
names = [x.name for x in of_mass("selected_mass") if x.name in given]
out, lse = torch_paged_attn.selected_attention(**given)
mass = torch_paged_attn.selected_mass(softmax_lse=lse, **{name: given[name] for name in names})
assert mass.shape == given["key_indices"].shape

call = problem("flash_varlen", DIFFERENTIABLE)
into = {name: x for name, x in call.args.items() if name != "out_dtype"}
refused(torch_paged_attn.flash_varlen_out, torch.empty_like(call.run()[0]), **into | NEW[0])
call.args["q"].requires_grad_()
torch_paged_attn.flash_varlen(**call.args)[0].sum().backward()  # the backward takes them, too
assert call.args["q"].grad is not None
refused(torch_paged_attn.flash_varlen, **call.args | NEW[1])

listed = arguments("flash_varlen")
for backend in backends():
    for new in () if backend.is_compiled else NEW:
        given = {x.name: x.default for x in listed} | problem("flash_varlen").args | new
        tensors = [given[x.name] for x in listed if not x.keyword_only]  # as the dispatcher does
        options = {x.name: given[x.name] for x in listed if x.keyword_only}
        refused(backend.function("flash_varlen"), *tensors, **options)
"""

NEW_OP = '''
from torch import Tensor
import torch
from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.checks import check_dim
from torch_paged_attn.ops.paths import public

def check(x: Tensor) -> None:
    check_dim("new_op", "x", x, "(rows, columns)")

SCHEMA = "new_op(Tensor x) -> Tensor"
_op = define(SCHEMA, check=check, check_values=lambda x: None, fake=lambda x: x + 1)

@public
def new_op(x: Tensor) -> Tensor:
    """Nothing yet."""
    return _op(x)
'''
OPERATOR = """
import api_pages
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
import torch_paged_attn
from torch_paged_attn.ops.backend import backends


def refused(error, x):
    try:
        torch_paged_attn.new_op(x)
    except error as raised:
        print(raised)


refused(NotImplementedError, torch.ones(2, 3))
with FakeTensorMode():
    assert torch_paged_attn.new_op(torch.ones(2, 3)).shape == (2, 3)
    refused(ValueError, torch.ones(2))
paths = torch_paged_attn.explain("new_op", torch.ones(2, 3)).paths
assert not any(path.kernel for path in paths.values())
print(paths["cpu"].reason)
assert not any(backend.has("new_op") for backend in backends())
assert "## new_op" in api_pages.text("operators")
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of the package, and a function that puts text before a line of one of its files."""
    package = tmp_path / "torch_paged_attn"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for library in PACKAGE.glob("*.so"):
        (package / library.name).symlink_to(library)

    def add(file, line, text):
        path = package / file
        before = path.read_text()
        assert before.count(line) == 1
        path.write_text(before.replace(line, text + line))

    return tmp_path, add


@pytest.fixture
def python(programs, copy):
    """Runs code on the copy; returns the lines that it prints."""

    def run(code):
        return programs.run(code, str(copy[0]), str(TOOLS), TRITON_INTERPRET="1").splitlines()

    return run


def test_every_backend_refuses_a_new_argument(copy, python):
    _, add = copy
    given = '    {} = argument({}, is_optional=True, meaning="None yet.")\n'
    tensor = given.format("new_tensor: Tensor | None", "None")
    add("attention_call.py", "    _: dataclasses.KW_ONLY\n", tensor)
    number = given.format("new_number: float", "0.5")
    add("attention_call.py", "    layout: BlockLayout | None = None\n", number)
    add("testing/problem.py", "    tail: bool = False", "    new_number: float = 0.5\n")
    ops = ("flash_varlen", "blocksparse", "selected_attention")
    refused = [(op, name, "cpu") for op in ops for name in ("new_tensor", "new_number")]
    refused += [("flash_varlen_out", "new_tensor", "cpu"), ("flash_varlen", "new_number", "cpu")]
    for backend in ("tpu", "neuron", "triton"):
        refused += [("flash_varlen", name, backend) for name in ("new_tensor", "new_number")]
    assert python(ARGUMENTS) == [
        f"{op}(): {name} is not supported by the {backend} backend" for op, name, backend in refused
    ]


def test_every_backend_refuses_a_new_operator(copy, python):
    folder, add = copy
    (folder / "torch_paged_attn/ops/new_op.py").write_text(NEW_OP)
    add(
        "ops/__init__.py",
        "_library.bind_backends()\n",
        "from torch_paged_attn.ops.new_op import new_op\n\n",
    )
    add("ops/__init__.py", '    "blocksparse",\n', '    "new_op",\n')
    assert python(OPERATOR) == [
        "new_op(): not supported by the cpu backend",
        "new_op(): expected x to be (rows, columns), got shape (2,)",
        "the cpu backend does not have it yet",
    ]
