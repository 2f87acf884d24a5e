"""Every backend that can run here, by name. A new backend joins the whole suite with one line."""

import pytest
import torch

DEVICES = {"cpu": "cpu"}
if torch.cuda.is_available():
    DEVICES["triton"] = "cuda"


@pytest.fixture(params=DEVICES, scope="session")
def device(request):
    return torch.device(DEVICES[request.param])


@pytest.fixture(autouse=True)
def poison_allocations():
    """`torch.empty` hands out NaN: a kernel that leaves an element unwritten is found."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def forget_calls():
    """Calls on a GPU are planned anew: the environment may have changed since."""
    if "triton" in DEVICES:
        from torch_paged_attn.backends.triton.runtime import launch_cache

        launch_cache.clear()
