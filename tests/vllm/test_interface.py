"""Our classes take what the installed vLLM hands to a backend's."""

import inspect
import types

import pytest
import torch
from vllm.v1.attention import backend as stock

from torch_paged_attn import _model_calls
from torch_paged_attn._model_calls import Sizes
from torch_paged_attn._model_config import Layer
from torch_paged_attn.integrations import _vllm_backend as ours
from torch_paged_attn.integrations._vllm_warmup import serving_of

PAIRS = {
    "AttentionBackend": ours.PagedAttentionBackend,
    "AttentionMetadataBuilder": ours.MetadataBuilder,
    "AttentionImpl": ours.PagedAttention,
}


def overridden():
    for base, own in PAIRS.items():
        theirs = getattr(stock, base)
        for name, function in vars(own).items():
            if callable(getattr(function, "__func__", function)) and hasattr(theirs, name):
                yield pytest.param(getattr(theirs, name), getattr(own, name), id=f"{base}.{name}")


@pytest.mark.parametrize(("theirs", "own"), list(overridden()))
def test_whatever_is_given_is_taken(theirs, own):
    wanted, taken = (inspect.signature(x).parameters for x in (theirs, own))
    kinds = {x.kind for x in taken.values()}
    for name, parameter in wanted.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        is_taken = name in taken or inspect.Parameter.VAR_KEYWORD in kinds
        assert is_taken, f"{name} is not taken"
    required = [n for n, x in taken.items() if x.default is x.empty and n in wanted]
    assert required == [n for n in wanted if n in required], "another order"
    new = [n for n, x in taken.items() if x.default is x.empty and n not in wanted]
    assert [n for n in new if taken[n].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD] == []


def test_every_abstract_method_is_there():
    for base, own in PAIRS.items():
        assert not getattr(own, "__abstractmethods__", ()), base


def test_a_layer_can_be_fed_by_a_fused_write():
    """`forward` runs without key and value: test_launches.py."""
    assert ours.PagedAttentionBackend.supports_kv_cache_update_bypass
    assert not ours.PagedAttentionBackend.forward_includes_kv_cache_update


@pytest.mark.parametrize("window", [None, 128])
def test_kernels_are_compiled_elsewhere_for_the_same_calls(window):
    """What `python -m torch_paged_attn compile` compiles for is what the plugin asks for."""
    impl = ours.PagedAttention(32, 128, 128**-0.5, 8, None, window, "fp8", None)
    engine = types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=4096),
        model_config=types.SimpleNamespace(dtype=torch.bfloat16, max_model_len=2000),
        cache_config=types.SimpleNamespace(kv_cache_layout=None),
    )
    asked = serving_of(impl, engine, types.SimpleNamespace(block_size=16), None, False)
    sizes = Sizes(torch.bfloat16, torch.float8_e4m3fn, 16, 64, 4096, 2000)
    layer = Layer(32, 8, 128, 128, 128**-0.5, -1 if window is None else window - 1)
    assert repr(_model_calls.serving_of(layer, sizes)) == repr(asked)
