"""SGLang's pools, layers and batches of requests on our backend, beside its own on torch.

Not the engine: SGLang has no CPU package on PyPI, and its wheel wants CUDA to serve. Golden is its
backend on torch in float64, and what that is off by in float32 is what ours may be off by.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from torch_paged_attn.integrations import sglang as paged
from torch_paged_attn.testing import assert_as_right_as

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 16, 256
# new and cached tokens of each request
CHUNKS = (7, 30), (19, 0), (1, 64), (40, 5)


class Step:
    """A runner whose pool holds cached keys, and a batch of requests in it."""

    def __init__(self, chunks, page_size=1, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        self.dtype = dtype
        self.pool = MHATokenToKVPool(
            SLOTS, page_size, dtype, KV_HEADS, DIM, 1, "cpu", False, enable_alt_stream=False
        )
        self.requests = ReqToTokenPool(8, 128, "cpu", False)
        free = torch.randperm(SLOTS // page_size - 1, generator=generator) + 1
        where, lengths = [], [new + cached for new, cached in chunks]
        for request, (new, cached) in enumerate(chunks, 1):
            count = -(-(new + cached) // page_size)
            pages, free = free[:count], free[count:]
            slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
            slots = slots[: new + cached]
            self.requests.req_to_token[request, : len(slots)] = slots.int()
            where.append(slots[cached:])
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        new = torch.tensor([new for new, _ in chunks])
        is_decode = all(new == 1)
        self.batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
            req_pool_indices=torch.arange(1, len(chunks) + 1),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            extend_seq_lens=None if is_decode else new,
            extend_prefix_lens=torch.tensor([cached for _, cached in chunks]),
            out_cache_loc=torch.cat(where),
            encoder_lens=None,
            encoder_out_cache_loc=None,
        )
        tokens = int(new.sum())
        self.q = torch.randn(tokens, HEADS * DIM, generator=generator).to(dtype)
        self.k, self.v = torch.randn(2, tokens, KV_HEADS, DIM, generator=generator).to(dtype)

    @property
    def runner(self):
        return SimpleNamespace(
            device="cpu", req_to_token_pool=self.requests, token_to_kv_pool=self.pool
        )

    def answer(self, backend, layer, **options):
        backend.init_forward_metadata(self.batch)
        return backend.forward(self.q, self.k, self.v, layer, self.batch, **options)


def layer_of(**options):
    return RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0, **options)


LAYERS = {
    "decoder": {},
    "window": {"sliding_window_size": 8},
    "encoder": {"attn_type": AttentionType.ENCODER_ONLY},
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunks", [CHUNKS, ((1, 30), (1, 0), (1, 64))], ids=["extend", "decode"])
@pytest.mark.parametrize("name", LAYERS)
def test_answers_are_those_of_sglangs_backend_on_torch(name, chunks, page_size):
    if name == "encoder":
        chunks = tuple((new + cached, 0) for new, cached in chunks)
    ours, theirs, exact = (
        Step(chunks, page_size, dtype) for dtype in (torch.float32, torch.float32, torch.float64)
    )
    layer = layer_of(**LAYERS[name])
    out = ours.answer(paged.create(ours.runner), layer)
    golden = exact.answer(TorchNativeAttnBackend(exact.runner), layer)
    peer = theirs.answer(TorchNativeAttnBackend(theirs.runner), layer)
    assert_as_right_as(out, golden, peer)
    assert torch.equal(ours.pool.k_buffer[0], theirs.pool.k_buffer[0])


def test_soft_cap_and_sinks_reach_the_op():
    step = Step(CHUNKS)
    plain = step.answer(paged.create(step.runner), layer_of())
    capped = step.answer(paged.create(step.runner), layer_of(logit_cap=0.5))
    sunk = step.answer(paged.create(step.runner), layer_of(), sinks=torch.ones(HEADS))
    assert not torch.equal(plain, capped) and not torch.equal(plain, sunk)
    assert (sunk.norm() < plain.norm()).item()
    in_16_bits = torch.ones(HEADS, dtype=torch.bfloat16)  # as SGLang's models hold them
    assert torch.equal(step.answer(paged.create(step.runner), layer_of(), sinks=in_16_bits), sunk)


def test_without_lengths_on_the_host_the_table_is_whole():
    step = Step(CHUNKS)
    expected = step.answer(paged.create(step.runner), layer_of())
    step.batch.seq_lens_cpu = None
    assert torch.equal(step.answer(paged.create(step.runner), layer_of()), expected)


def test_refusals():
    step = Step(CHUNKS)
    backend = paged.create(step.runner)
    with pytest.raises(NotImplementedError, match="does not support cross attention"):
        step.answer(backend, layer_of(is_cross_attention=True))
    with pytest.raises(NotImplementedError, match="does not support k_rope"):
        step.answer(backend, layer_of(), k_rope=step.k)
    step.batch.forward_mode = ForwardMode.TARGET_VERIFY
    with pytest.raises(NotImplementedError, match="tree of drafts"):
        backend.init_forward_metadata(step.batch)
    step.pool.swa_layer_nums = 1
    with pytest.raises(NotImplementedError, match="--disable-hybrid-swa-memory"):
        paged.create(step.runner)


def test_the_flag_is_accepted_after_register():
    paged.register()
    paged.register()
    assert ATTENTION_BACKENDS[paged.NAME] is paged.create
    assert choices.ATTENTION_BACKEND_CHOICES.count(paged.NAME) == 1


def test_another_owner_is_named():
    program = """
from sglang.srt.layers.attention.attention_registry import register_attention_backend
register_attention_backend("paged_attn")(lambda runner: None)
from torch_paged_attn.integrations import sglang as paged
try:
    paged.register()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "has an attention backend 'paged_attn' of __main__" in done.stdout, done.stderr
