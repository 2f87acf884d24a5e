"""Importing the package is light, and a pure-Python install says what is missing."""

import ast
import graphlib
import json
import re
from pathlib import Path

import pytest
import torch

import torch_paged_attn
from torch_paged_attn import environment
from torch_paged_attn._doctor import printed

PACKAGE = Path(torch_paged_attn.__file__).parent
HEAVY = ("triton", "jax", "nki", "transformers", "matplotlib", "hypothesis", "rich", "ml_dtypes")


@pytest.fixture
def python(programs):
    """Runs code in a fresh process, where torch is imported, and returns what it prints."""
    return lambda code, **environment: programs.run(code, str(PACKAGE.parent), **environment)


def test_import_brings_no_heavy_package(python):
    code = f"""
import torch, sys
before = set(sys.modules)
import torch_paged_attn
from torch_paged_attn import environment
new = {{m.partition('.')[0] for m in set(sys.modules) - before}}
print(sorted(new & set({HEAVY!r})), 'torch_paged_attn.reference' in sys.modules)
"""
    assert python(code).strip() == "[] False"


def test_import_works_where_optional_packages_cannot_be_imported(python):
    code = f"""
import sys
for name in {HEAVY!r}:
    sys.modules[name] = None
import torch_paged_attn
from torch_paged_attn import environment
print('fine')
"""
    assert python(code).strip() == "fine"


def test_without_the_library_every_op_says_how_to_get_it(python):
    code = """
import torch, torch_paged_attn
out = torch.zeros(1, 1, 1)
lse = torch.zeros(1, 1)
try:
    torch_paged_attn.merge_states(out, lse, out, lse)
except NotImplementedError as error:
    print(error)
print(torch_paged_attn.merge_states(*(t.to('meta') for t in (out, lse, out, lse)))[0].shape)
"""
    text = python(code, PAGED_ATTN_LIBRARY="/nonexistent/_C.abi3.so")
    assert "merge_states(): PAGED_ATTN_LIBRARY names /nonexistent/_C.abi3.so" in text
    assert "torch.Size([1, 1, 1])" in text  # fakes need no library


REPORT = """
import runpy, sys
sys.argv[1:] = ["--json"]
runpy.run_module("torch_paged_attn", run_name="__main__", alter_sys=True)
"""


def test_report(python):
    known = json.loads(python(REPORT))
    cpu = known["devices"]["cpu"]
    assert cpu["backend"] == "cpu" and "flash_varlen" in cpu["ops"] and cpu["instruction_set"]
    assert known["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    text = printed(known)
    assert "paged_attn::reshape_and_cache.split" in text

    known = json.loads(python(REPORT, PAGED_ATTN_LIBRARY="/nonexistent/_C.abi3.so"))
    assert "PAGED_ATTN_LIBRARY" in known["devices"]["cpu"]["reason"]


def test_an_instruction_set_that_is_not_there_is_a_clear_error(python, programs):
    code = "import torch, torch_paged_attn; print(torch.ops.paged_attn.cpu_isa())"
    assert python(code, PAGED_ATTN_CPU_ISA="generic").strip() == "generic"
    status, _, errors = programs.end(code, str(PACKAGE.parent), PAGED_ATTN_CPU_ISA="z80")
    assert status == 1
    assert "z80" in errors and torch.ops.paged_attn.cpu_isas() in errors


# folder -> what its modules may import of ours, besides the names of a call's arguments
MAY_IMPORT = {
    "ops": ("ops",),
    "reference": ("reference",),
    "backends/cpu": ("backends.cpu", "ops"),
    "backends/tpu": ("backends.tpu", "ops"),
    "backends/neuron": ("backends.neuron", "lru", "ops"),
    "backends/triton": ("backends.triton", "lru", "ops"),
    "backends/triton/portable": tuple(
        "backends.triton." + m for m in ("portable", "common", "runtime", "tuning")
    ),
    "backends/triton/hopper": (
        *("backends.triton." + m for m in ("hopper", "common", "runtime", "tuning")),
        *("lru", "ops.lacking"),
    ),
    "backends/triton/common": ("backends.triton.common", "backends.triton.runtime", "lru", "ops"),
    "backends/triton/runtime": ("backends.triton.runtime", "lru", "ops"),
    "distributed": ("distributed", "lru", "ops"),
    "integrations": ("integrations", "_processor", "_serving", "_warmup", "lru", "ops"),
    "layouts": ("layouts", "ops.accepted"),
    "testing": ("testing", "reference", "ops.checks"),
}


def imported(path):
    """The modules of this package that a file imports, without the package's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [x.name for x in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "torch_paged_attn":
            names = [f"torch_paged_attn.{x.name}" for x in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        else:
            continue
        yield from (
            x.removeprefix("torch_paged_attn.") for x in names if x.startswith("torch_paged_attn.")
        )


def test_every_form_of_import_is_seen(tmp_path):
    page = tmp_path / "page.py"
    page.write_text(
        "from torch_paged_attn import a\nimport torch_paged_attn.b\n"
        "def f():\n    from torch_paged_attn.c.d import e\nimport torch\n"
    )
    assert sorted(imported(page)) == ["a", "b", "c.d"]


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_run_one_way(folder):
    paths = sorted((PACKAGE / folder).rglob("*.py"))
    assert paths, f"there is no folder {folder}"
    for path in paths:
        for module in imported(path):
            allowed = (
                "argument",
                "attention_call",
                "backward_call",
                "environment",
                "selection",
                "selection_calls",
                *MAY_IMPORT[folder],
            )
            assert any(module == a or module.startswith(a + ".") for a in allowed), (
                f"{path}: {module}"
            )


def test_only_the_protocol_reaches_a_backend():
    """What others need of a backend is a method of `Backend` (ops/backend.py)."""
    paths = [path for path in PACKAGE.rglob("*.py") if "backends" not in path.parts]
    assert len(paths) > 80
    reached = {
        (str(path.relative_to(PACKAGE)), module)
        for path in paths
        for module in imported(path)
        if module.startswith("backends")
    }
    assert not reached


def test_no_circle_in_ops():
    """Not by imports within functions either."""
    files = {f"ops.{path.stem}": path for path in (PACKAGE / "ops").glob("[!_]*.py")}
    files |= {f"ops.{path.stem}": path for path in (PACKAGE / "ops").glob("_[!_]*.py")}
    of = {}
    for name, path in files.items():
        # `from torch_paged_attn.ops import x` may name a module of ops
        modules = {*imported(path), *(f"ops.{x}" for x in from_ops(path))}
        of[name] = {module for module in modules if module in files} - {name}
    graphlib.TopologicalSorter(of).prepare()  # raises CycleError


def from_ops(path):
    nodes = (x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.ImportFrom))
    return [x.name for n in nodes if n.module == "torch_paged_attn.ops" for x in n.names]


def test_every_public_name_is_found():
    for name in torch_paged_attn.__all__:
        assert getattr(torch_paged_attn, name) is not None


@pytest.mark.parametrize("value", ["junk", "true", "2"])
def test_a_flag_that_is_neither_0_nor_1_is_named(value, monkeypatch):
    monkeypatch.setenv("PAGED_ATTN_CHECK", value)
    with pytest.raises(ValueError, match=f"expected PAGED_ATTN_CHECK to be 0 or 1, got '{value}'"):
        environment._flag("PAGED_ATTN_CHECK")


def test_every_public_name_is_found_by_dir():
    """As completion in a shell finds it, although some modules are imported later."""
    names = set(torch_paged_attn.__all__)
    assert names <= set(dir(torch_paged_attn))
    for name in names:
        assert getattr(torch_paged_attn, name) is not None


# what Triton 3.6 takes and 3.9 refuses when a kernel compiles -> the files that may say it
REFUSED_LATER = {
    # the names of functions that 3.9 has only to raise
    r"async_copy_(global_to_shared|shared_to_global)\b": {"tma.py"},
    # several types as one constant: they become constants, and not types
    r"constexpr = \(?[gt]l\.\w+, *[gt]l\.": set(),
}


@pytest.mark.parametrize("text", REFUSED_LATER)
def test_kernels_say_nothing_that_a_later_triton_refuses(text):
    """Only `make test-triton` compiles with another Triton."""
    files = (PACKAGE / "backends" / "triton").rglob("*.py")
    assert {x.name for x in files if re.search(text, x.read_text())} == REFUSED_LATER[text]
