"""A layer of a step is attention alone: nothing is copied, cast or filled."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.attention.backend import AttentionType

from torch_paged_attn.integrations._vllm_backend import Metadata, PagedAttention

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 32, 16, 12
# queries and keys of each sequence
LENGTHS = ((1, 20), (7, 7), (5, 33))


class Launched(TorchDispatchMode):
    """Notes every operator that is more than another view of a tensor."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Layer:
    _k_scale = _v_scale = torch.tensor(0.5)


def step(dtype, kv_cache_dtype, layout):
    """Metadata, the fused projection of a step, its cache and its output, all with two rows of
    padding, as vLLM's CUDA graphs have them."""
    tokens = sum(new for new, _ in LENGTHS)
    width = (HEADS + 2 * KV_HEADS) * DIM
    fused = torch.randn(tokens + 2, width, dtype=dtype)
    q, k, v = fused.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
    stored = dtype if kv_cache_dtype == "auto" else torch.uint8
    order = {"heads first": (0, 1, 2, 3), "tokens first": (0, 2, 1, 3)}[layout]
    by_token = kv_cache_dtype.endswith("per_token_head")
    shape = BLOCKS, KV_HEADS, BLOCK, 2 * (DIM + 4 * by_token)
    cache = torch.zeros([shape[i] for i in order], dtype=stored).permute(order)
    table = torch.randperm(BLOCKS)[:9].view(3, 3).int()
    slots = []
    for row, (new, keys) in zip(table, LENGTHS, strict=True):
        positions = torch.arange(keys - new, keys)
        slots.append(row[positions // BLOCK] * BLOCK + positions % BLOCK)
    starts = torch.tensor([0, *(new for new, _ in LENGTHS)]).cumsum(0).int()
    lengths = torch.tensor([keys for _, keys in LENGTHS]).int()
    metadata = Metadata(tokens, starts, 7, lengths, 33, table, torch.cat(slots), True)
    views = q.unflatten(1, (HEADS, DIM)), *(x.unflatten(1, (KV_HEADS, DIM)) for x in (k, v))
    return metadata, views, cache, torch.full((tokens + 2, HEADS * DIM), 77.0, dtype=dtype)


@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "int8_per_token_head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_alone(dtype, kv_cache_dtype, layout):
    metadata, (q, k, v), cache, output = step(dtype, kv_cache_dtype, layout)
    sinks = torch.zeros(HEADS, dtype=torch.bfloat16)
    impl = PagedAttention(
        HEADS, DIM, DIM**-0.5, KV_HEADS, None, 24, kv_cache_dtype, None, AttentionType.DECODER,
        None, sinks,
    )  # fmt: skip
    impl.process_weights_after_loading(dtype)
    with torch.inference_mode(), Launched() as seen:
        impl.do_kv_cache_update(Layer, k, v, cache, metadata.slot_mapping)
        written = list(seen.names)
        seen.names.clear()
        found = impl.forward(Layer, q, None, None, cache, metadata, output)
    write = "quantize" if kv_cache_dtype.endswith("per_token_head") else "split"
    assert written == [f"paged_attn::reshape_and_cache.{write}"]
    assert seen.names == ["paged_attn::flash_varlen_out"]
    assert found is output
    assert (output[-2:] == 77).all() and (output[:-2] != 77).all()


def test_encoders():
    metadata, (q, k, v), _, output = step(torch.float32, "auto", "heads first")
    impl = PagedAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, attn_type=AttentionType.ENCODER_ONLY)
    with torch.inference_mode(), Launched() as seen:
        impl.forward(Layer, q, k, v, None, metadata, output)
    assert seen.names == ["paged_attn::flash_varlen_out"]
