"""The folder that stands in for kernels of Hugging Face's hub. tests/hub loads it."""

import importlib.util
import json

import pytest

from torch_paged_attn.integrations import flash_attn, hub

FOLDER = next(part for part in hub.local_kernels().split(":")).partition("=")[2]


def test_every_name_has_the_folder():
    parts = [part.split("=") for part in hub.local_kernels().split(":")]
    assert [name for name, _ in parts] == list(hub.REPLACED)
    assert {folder for _, folder in parts} == {str(hub.__path__[0])}


@pytest.mark.parametrize("backend", ["cpu", "cuda", "rocm"])
def test_a_variant_offers_our_functions(backend):
    variant = f"{FOLDER}/build/torch-{backend}"
    with open(f"{variant}/metadata.json") as file:
        metadata = json.load(file)
    assert metadata["backend"] == {"type": backend} and metadata["id"].isidentifier()
    spec = importlib.util.spec_from_file_location(metadata["id"], f"{variant}/__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert {getattr(module, name) for name in module.__all__} == {
        flash_attn.flash_attn_func,
        flash_attn.flash_attn_varlen_func,
        flash_attn.flash_attn_with_kvcache,
    }
