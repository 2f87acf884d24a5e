"""How the tests move tensors to a device: `testing.inputs.moved`."""

import pytest
import torch

from torch_paged_attn.testing import build
from torch_paged_attn.testing.inputs import moved
from torch_paged_attn.testing.problems import EXTENDED

# rows with their scales beside them: views of one storage with two dtypes
ROWS = {name: x for name, x in EXTENDED.items() if x.cache_layout == "rows"}


def assert_alike(here, there):
    """Views have the same dtypes, shapes, strides and offsets, and share storages as here."""
    for x, y in zip(here, there, strict=True):
        assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
        assert x.storage_offset() == y.storage_offset() and y.device.type == "meta"
        assert x.untyped_storage().nbytes() == y.untyped_storage().nbytes()
    shared, shared_there = (
        [[x.untyped_storage()._cdata == y.untyped_storage()._cdata for y in views] for x in views]
        for views in (here, there)
    )
    assert shared == shared_there


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("first", ["row", "scale"])
def test_views_of_several_dtypes(dtype, first):
    memory = torch.zeros(5, 3, 24 + 4, dtype=torch.uint8)
    row, scale = memory[..., :24].view(dtype), memory[..., 24:].view(torch.float32)[..., 0]
    views = (row, scale, torch.ones(2)) if first == "row" else (scale, row, torch.ones(2))
    assert_alike(views, moved(views, "meta", {}))


@pytest.mark.parametrize("name", ROWS)
def test_calls(name):
    call = build(ROWS[name])
    tensors, there = (
        [x for x in args.values() if isinstance(x, torch.Tensor)]
        for args in (call.args, call.to("meta").args)
    )
    assert_alike(tensors, there)
