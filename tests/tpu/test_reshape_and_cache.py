"""What is the TPU's own in `reshape_and_cache`: runs of slots in tiles, or rows scattered."""

import os

import pytest
import torch
from jax_arrays import to_jax, to_torch
from pallas_oracle import DMA_MODES, watch

from torch_paged_attn import reference
from torch_paged_attn.backends.tpu.cache_write import reshape_and_cache
from torch_paged_attn.backends.tpu.pages import packed_shape

# each way of the DMAs is compiled anew, in seconds: one or two cases of a test have both
IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def ways(both: bool) -> tuple[str, ...]:
    return DMA_MODES if both or IS_THOROUGH else ("on_wait",)


# runs that end inside tiles, fill whole ones, go back to a tile that is being written and to a slot
RUNS = [3, 4, 5, -1, 6, 40, *range(64, 98), 4, 3, 3, 70, 191, 69, *range(100, 132)]


@pytest.mark.parametrize(
    ("num", "page_size"),
    [
        (0, 32),
        (1, 32),
        pytest.param(66, 32, marks=pytest.mark.thorough),
        pytest.param(66, 31, marks=pytest.mark.device_suite),
    ],
)
def test_rows_past_the_slots_are_padding(num, page_size):
    g = torch.Generator().manual_seed(0)
    key, value = (torch.randn(70, 3, 24, generator=g) for _ in range(2))
    slots = torch.randperm(160, generator=g)[:num].int()
    slots[::7] = -1
    kv_cache = torch.zeros(2, 6, 3, page_size, 24)
    expected = kv_cache.clone()
    reference.reshape_and_cache(key, value, expected, slots)
    tensors = key, value, kv_cache, slots

    def write(interpret):
        # the op takes the cache away
        return reshape_and_cache(*(to_jax(t) for t in tensors), interpret=interpret)

    written = watch(write, *ways((num, page_size) == (66, 31)))
    assert torch.equal(to_torch(written), expected)


def runs(capacity, count):
    """`count` slots: those of `RUNS` that a cache of so many has, then slots of no token."""
    there = [slot for slot in RUNS if slot < capacity]
    return [*there, *[-1] * (count - len(there))]


@pytest.mark.device_suite
def test_runs_of_large_rows_have_fewer_buffers(monkeypatch):
    """Heads of 8 numbers at pages of 256 take 1 MiB of VMEM for each run on its way."""
    import jax

    from torch_paged_attn.backends.tpu.cache_write import run_writer

    assert [run_writer.num_buffers(kib << 10) for kib in (128, 640, 1088, 8192)] == [
        16,
        16,
        8,
        2,
    ]
    jax.clear_caches()
    monkeypatch.setattr(run_writer, "MOST_BYTES", 1)
    g = torch.Generator().manual_seed(0)
    key, value = (torch.randn(len(RUNS), 3, 24, generator=g) for _ in range(2))
    kv_cache = torch.zeros(2, 6, 3, 32, 24)
    expected, slots = kv_cache.clone(), torch.tensor(RUNS, dtype=torch.int32)
    reference.reshape_and_cache(key, value, expected, slots)

    def write(interpret):
        tensors = key, value, kv_cache, slots
        return reshape_and_cache(*(to_jax(t) for t in tensors), interpret=interpret)

    try:
        assert torch.equal(to_torch(watch(write, *ways(False))), expected)
    finally:
        jax.clear_caches()  # of programs with so few buffers


def tiles(*firsts, size):
    """Slots that fill tiles of `size`, which begin at these."""
    return [first + i for first in firsts for i in range(size)]


def prompts(size):
    """Slots of whole tiles, as a prompt's, with what may stand between them: shorter runs, a slot
    of no token, a tile that is still being written, one that the cache does not have; and at last
    more tiles than there are buffers, all different.
    """
    return [
        *tiles(0, 5 * size, 2 * size, 3 * size, size=size),
        *tiles(6 * size, 4 * size, 5 * size, 7 * size, size=size),
        *range(size + 3, 2 * size),
        -1,
        *tiles(2 * size, size, 2 * size, 0, size=size),
        *tiles(9 * size, 8 * size, 7 * size, 10 * size, size=size),
        *tiles(10 * size, 11 * size, 3 * size, 12 * size, size=size),
        *tiles(11 * size, 0, 40 * size, size, size=size),
        7,
        *range(6 * size - 1, 8 * size - 1),
        *tiles(*range(0, 20 * size, size), size=size),
    ]


# each is compiled: one whose bits, lanes and fold others have is left to `make thorough`
KINDS = [
    pytest.param("bfloat16", "bfloat16", 2, 64, 32, marks=pytest.mark.device_suite),
    pytest.param("float32", "float32", 1, 128, 8, marks=pytest.mark.device_suite),
    *(
        pytest.param(*kind, marks=pytest.mark.thorough)
        for kind in (
            ("bfloat16", "bfloat16", 3, 256, 16),
            ("bfloat16", "float8_e4m3fn", 1, 128, 32),
            ("float32", "float32", 2, 24, 8),
            ("float16", "float16", 2, 128, 16),
            ("bfloat16", "bfloat16", 2, 128, 16),
        )
    ),
]


@pytest.mark.parametrize(("dtype", "stored", "heads", "head_dim", "size"), KINDS)
def test_whole_tiles_and_runs(dtype, stored, heads, head_dim, size):
    g = torch.Generator().manual_seed(0)
    prompt = prompts(size)
    shape = 2, 10, heads, 2 * size, head_dim
    key, value = torch.randn(2, len(prompt), *shape[2::2], generator=g).to(getattr(torch, dtype))
    kv_cache = torch.randn(shape, generator=g).to(getattr(torch, stored))
    lies = packed_shape(shape) if head_dim == 64 else shape
    both = ways(size == 32)
    # as many slots, so that nothing is compiled anew
    for slots in (prompt, runs(20 * size, len(prompt))):
        slots = torch.tensor(slots, dtype=torch.int32)
        expected = kv_cache.clone()
        is_there = slots < 20 * size  # past the end: the reference raises, the kernel skips it
        reference.reshape_and_cache(key, value, expected, torch.where(is_there, slots, -1))
        tensors = key, value, kv_cache.view(lies), slots

        def write(interpret, tensors=tensors):
            return reshape_and_cache(*(to_jax(t) for t in tensors), interpret=interpret)

        written = to_torch(watch(write, *both)).reshape(shape)
        # 8-bit tensors have no comparison
        assert torch.equal(written.view(torch.uint8), expected.view(torch.uint8))
