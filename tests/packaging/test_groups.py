"""Device code takes its arguments in groups."""

import ast
import importlib
from pathlib import Path

import pytest

import torch_paged_attn

pytest.importorskip("triton")

PACKAGE = Path(torch_paged_attn.__file__).parent
BACKEND = PACKAGE / "backends" / "triton"
MOST = 10

# why these take more
FLAT = {
    "_graph_attention_fwd_kernel": "a node of a graph takes no tuples",
    "_merge_kernel": "a node of a graph takes no tuples",
    "_fold_block": "a consumer's running sums, which it returns",
    "sum_values": "a tile's operands, and which of its tiles of keys a consumer takes",
    "_hopper_backward_keys_kernel": "eight boxes, each with a description of its own",
}


def one_by_one(call, module):
    """The arguments that a decorator names, so that Triton does not compile for what divides them:
    it finds none in a group.
    """
    for keyword in getattr(call, "keywords", ()):
        if keyword.arg == "do_not_specialize":
            names = compile(ast.Expression(keyword.value), module.__name__, "eval")
            return set(eval(names, vars(module)))
    return set()


def device_functions():
    """Names, and how many arguments but for those."""
    for path in sorted(BACKEND.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        for x in ast.parse(path.read_text()).body:
            for decorator in getattr(x, "decorator_list", ()):
                if ast.unparse(decorator).startswith(("triton.jit", "gluon.jit")):
                    flat = one_by_one(decorator, importlib.import_module(".".join(parts)))
                    yield x.name, len({a.arg for a in x.args.args} - flat)


def test_device_functions_take_groups():
    counts = dict(sorted(device_functions(), key=lambda x: x[1]))  # the most of a name
    assert len(counts) > 100
    assert {name for name, count in counts.items() if count > MOST} == set(FLAT)
