"""What is Neuron's own in `reshape_and_cache`: strides that it refuses."""

import pytest
import torch

from torch_paged_attn.backends.neuron import BACKEND


def test_refuses_strides_that_are_no_rows_before_it_writes(machine):
    key, value = torch.randn(2, 40, 1, 24).unbind(0)
    k_cache = torch.zeros(40, 1, 1, 24)
    v_cache = torch.zeros(1000).as_strided((40, 1, 1, 24), (23, 1, 1, 1))
    write = BACKEND.function("reshape_and_cache.split")
    with pytest.raises(NotImplementedError, match="neuron backend: v_cache has strides"):
        write(key, value, k_cache, v_cache, torch.arange(40))
    assert not k_cache.any()
