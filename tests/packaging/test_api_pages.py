"""Every stable name has an entry in the API reference, with its signature and its arguments."""

import ast
import importlib
import inspect
import re

import api_pages
import pytest

import torch_paged_attn
from torch_paged_attn import layouts, testing
from torch_paged_attn.integrations import flash_attn
from torch_paged_attn.ops import signature

NAMES = api_pages.names()
LISTED = {name.rpartition(".")[2] for name in NAMES}


def test_every_public_name_has_an_entry():
    missing = {name for name in torch_paged_attn.__all__ if name not in LISTED | {"layouts"}}
    assert not missing
    for module in (layouts, flash_attn, testing):
        assert {f"{module.__name__}.{name}" for name in module.__all__} <= NAMES


@pytest.mark.parametrize("module", ["context_parallel", "decode", "sharding"])
def test_every_distributed_name_has_an_entry(module):
    found = importlib.import_module(f"torch_paged_attn.distributed.{module}")
    assert {f"{found.__name__}.{name}" for name in found.__all__} <= NAMES


@pytest.mark.parametrize("file", api_pages.PAGES)
def test_a_page_has_its_names(file):
    text = api_pages.text(file)
    for listed in api_pages.PAGES[file].names.values():
        for name in listed:
            assert f"# {name}\n" in text, name
    assert "{arguments}" not in text


@pytest.mark.parametrize("op", api_pages.OPS)
def test_an_operator_has_a_row_for_every_argument(op):
    text = "\n\n".join(api_pages.entry(op, getattr(torch_paged_attn, op), "##"))
    for argument in signature.arguments(op):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{argument.name}` |")]
        assert argument.meaning in row
        assert ("supported by" in row) == argument.is_optional
        assert f"    {argument.name}: " in text


@pytest.mark.parametrize("file", api_pages.PAGES)
def test_signatures_are_valid_python(file):
    """The first block below each heading."""
    blocks = re.findall(r"^#+ \w[\w.]*\n\n```python\n(.*?)\n```", api_pages.text(file), re.S | re.M)
    assert len(blocks) >= 3
    for block in blocks:
        ast.parse(block if " = " in block.partition("(")[0] else f"def {block}: pass")


def test_methods_have_entries():
    text = api_pages.text("kv_cache")
    members = vars(torch_paged_attn.PagedKVCache).items()
    public = [name for name, x in members if inspect.isfunction(x) or isinstance(x, property)]
    public = [name for name in public if not name.startswith("_")]
    assert len(public) >= 8
    assert all(f"### PagedKVCache.{name}\n" in text for name in public)
