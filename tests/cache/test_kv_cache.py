"""PagedKVCache: examples that read like its documentation. The state machine tests the rest."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from torch_paged_attn.kv_cache import CacheFull, PagedKVCache


def small_cache(num_pages=8, page_size=4, **kwargs):
    return PagedKVCache(2, num_pages, 1, page_size, 3, **kwargs)


def test_shapes_and_dtypes():
    cache = PagedKVCache(3, 5, 2, 16, 8, dtype=torch.float8_e4m3fn)
    assert cache.kv_cache.shape == (3, 2, 5, 2, 16, 8)
    assert cache.kv_cache.dtype == torch.float8_e4m3fn
    assert cache.kv_cache[1].is_contiguous()
    assert PagedKVCache(1, 1, 1, 1, 1, device="meta").kv_cache.device.type == "meta"


def test_values_of_another_head_dim():
    cache = PagedKVCache(2, 5, 2, 4, 8, head_dim_v=6, dtype=torch.bfloat16)
    for k, v in cache.kv_cache:
        assert k.shape == (5, 2, 4, 8) and v.shape == (5, 2, 4, 6)
    token = PagedKVCache.bytes_per_token(2, 2, 8, head_dim_v=6, dtype=torch.bfloat16)
    assert token * 5 * 4 == sum(x.nbytes for layer in cache.kv_cache for x in layer)
    # copy on write takes both
    cache.append("a", 2)
    cache.fork("a", "b")
    (page,) = cache.pages("a")
    for part in (x for layer in cache.kv_cache for x in layer):
        part[page] = 1.0
    cache.append("b", 1)
    (copied,) = cache.pages("b")
    assert copied != page
    assert all((x[copied] == 1.0).all() for layer in cache.kv_cache for x in layer)
    assert isinstance(PagedKVCache(1, 5, 2, 4, 8, head_dim_v=8).kv_cache, torch.Tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8, torch.bool, "fp8"])
def test_a_dtype_that_no_op_takes_is_refused(dtype):
    """Here, and not by the first write."""
    refused = pytest.raises(ValueError, match=r"expected dtype to be .*float8_e4m3fn.*, got")
    with refused:
        small_cache(dtype=dtype)
    with refused:
        PagedKVCache.bytes_per_token(1, 2, 8, dtype=dtype)


def test_batch_metadata():
    cache = small_cache()
    cache.append("a", 6)
    cache.append("b", 3)
    a, b = cache.pages("a"), cache.pages("b")
    batch = cache.batch(["b", "a"], [3, 2])
    assert batch.block_table.tolist() == [[b[0], -1], list(a)]
    assert batch.seqused_k.tolist() == [3, 6]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 5]
    assert batch.slot_mapping.tolist() == [
        *(4 * b[0] + offset for offset in range(3)),
        *(4 * a[1] + offset for offset in range(2)),
    ]
    assert (batch.max_seqlen_q, batch.max_seqlen_k) == (3, 6)
    for name in ("slot_mapping", "block_table", "seqused_k", "cu_seqlens_q"):
        assert getattr(batch, name).dtype == torch.int32
    assert cache.batch(["b"], [1], max_pages=3).block_table.tolist() == [[b[0], -1, -1]]


def test_empty_batches_and_sequences():
    cache = small_cache()
    batch = cache.batch([], [])
    assert batch.block_table.shape == (0, 0)
    assert batch.cu_seqlens_q.tolist() == [0]
    cache.append("a", 0)
    batch = cache.batch(["a"], [0])
    assert batch.block_table.shape == (1, 0)
    assert batch.seqused_k.tolist() == [0]
    assert batch.slot_mapping.shape == (0,)
    cache.free("a")
    assert cache.num_free_pages == 8


def test_slots_of_a_huge_cache_are_int64():
    cache = PagedKVCache(1, 2**20, 1, 2**12, 1, device="meta")
    cache.append("a", 1)
    assert cache.batch(["a"], [1]).slot_mapping.dtype == torch.int64


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_batch_under_a_default_device(device):
    cache = small_cache(device="cpu")
    cache.append("a", 6)
    cache.append("b", 3)
    expected = cache.batch(["a", "b"], [2, 3])
    with torch.device(device):
        batch = cache.batch(["a", "b"], [2, 3])
    for name in ("slot_mapping", "block_table", "seqused_k", "cu_seqlens_q"):
        assert torch.equal(getattr(batch, name), getattr(expected, name))


def test_a_common_prefix_is_shared():
    cache = small_cache()
    prompt = list(range(10))
    assert cache.append("a", prompt) == 0
    assert cache.append("b", [*prompt[:9], 99]) == 8
    assert cache.pages("a")[:2] == cache.pages("b")[:2]
    assert cache.pages("a")[2] != cache.pages("b")[2]
    assert cache.num_free_pages == 8 - 4
    # a page is the same only if everything before it is
    assert cache.append("c", [7, 7, 7, 7, *prompt[4:]]) == 0


def test_the_last_token_is_always_left_to_compute():
    cache = small_cache()
    cache.append("a", list(range(8)))
    assert cache.append("b", list(range(8))) == 4


def test_chunks_are_found_again_as_the_whole_prompt_is():
    cache = small_cache()
    cache.append("a", list(range(12)))
    assert cache.append("b", list(range(4))) == 0
    assert cache.append("b", list(range(4, 12))) == 4
    assert cache.pages("b")[1] == cache.pages("a")[1]


def test_freed_prefixes_stay_until_needed_and_the_oldest_goes_first():
    cache = small_cache(num_pages=5)
    cache.append("old", list(range(8)))
    cache.free("old")
    cache.append("new", list(range(100, 105)))
    cache.free("new")
    assert cache.num_free_pages == 5
    cache.append("other", 9)  # three pages: two blank ones and the end of the old prefix
    cache.free("other")
    assert cache.append("old", list(range(9))) == 4
    assert cache.append("new", list(range(100, 105))) == 4
    assert cache.num_free_pages == 0


def test_tokens_without_ids_end_the_sharing():
    cache = small_cache()
    cache.append("a", list(range(4)))
    cache.append("a", 2)
    cache.append("a", [6, 7, 8])
    assert cache.append("b", list(range(9))) == 4


def test_fork_copies_on_write():
    cache = small_cache()
    cache.append("a", 6)
    cache.kv_cache.copy_(torch.arange(cache.kv_cache.numel()).view_as(cache.kv_cache))
    cache.fork("a", "b")
    assert cache.pages("a") == cache.pages("b")
    assert cache.num_free_pages == 6
    before = cache.pages("b")[1]
    cache.append("a", 1)
    assert cache.pages("b")[1] == before
    own = cache.pages("a")[1]
    assert own != before
    assert torch.equal(cache.kv_cache[:, :, own], cache.kv_cache[:, :, before])
    # b is alone now: it writes in place
    cache.append("b", 1)
    assert cache.pages("b")[1] == before


def test_a_copy_that_raises_leaks_no_page():
    with torch.inference_mode():
        cache = small_cache()
    cache.append("a", 5)
    cache.fork("a", "b")
    pages = cache.pages("b")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="inference"):
            cache.append("b", 1)
    assert cache.pages("b") == pages
    assert cache.length("b") == 5
    assert cache.num_free_pages == 6
    cache.free("a")
    cache.append("b", 1)  # the page is no longer shared: nothing to copy
    cache.free("b")
    assert cache.num_free_pages == 8


def test_float8_pages_are_copied_bit_for_bit():
    cache = small_cache(dtype=torch.float8_e5m2)
    bits = cache.kv_cache.view(torch.uint8)
    bits.copy_(torch.arange(bits.numel()).view_as(bits) % 256)
    cache.append("a", 1)
    cache.fork("a", "b")
    cache.append("b", 1)
    (a,), (b,) = cache.pages("a"), cache.pages("b")
    assert a != b
    assert torch.equal(bits[:, :, a], bits[:, :, b])


def test_truncate_forgets_drafts():
    cache = small_cache()
    cache.append("a", list(range(9)))
    cache.truncate("a", 6)
    assert cache.length("a") == 6
    assert cache.num_free_pages == 6
    cache.append("a", [60, 70])
    # the page that held 4, 5, 6, 7 was overwritten: it must not be found by them any more
    assert cache.append("b", list(range(9))) == 4
    assert cache.append("c", [0, 1, 2, 3, 4, 5, 60, 70, 80]) == 8


def test_what_was_never_written_is_not_found():
    cache = small_cache()
    cache.append("a", list(range(8)))
    reused = cache.append("b", list(range(13)))
    assert reused == 8
    cache.free("b", written=reused)
    assert cache.append("c", list(range(13))) == 8


def test_a_full_cache_says_so_and_changes_nothing():
    cache = small_cache(num_pages=2)
    cache.append("a", 5)
    with pytest.raises(CacheFull, match="the KV cache is full: 1 pages needed, 0 available") as e:
        cache.append("b", 1)
    assert (e.value.needed, e.value.available) == (1, 0)
    assert isinstance(e.value, RuntimeError)
    assert "b" not in cache
    assert len(cache) == 1
    cache.fork("a", "b")
    with pytest.raises(CacheFull):
        cache.append("b", 1)  # needs a copy of the shared page
    cache.free("a")
    cache.append("b", 1)


def test_bad_calls_are_named():
    cache = small_cache()
    cache.append("a", 5)
    with pytest.raises(KeyError, match="no sequence 'x' in the cache"):
        cache.free("x")
    with pytest.raises(ValueError, match="tokens must not be negative, got -1"):
        cache.append("a", -1)
    with pytest.raises(ValueError, match="child must be a new sequence, got 'a', which exists"):
        cache.fork("a", "a")
    with pytest.raises(ValueError, match="length must be between 0 and 5, got 6"):
        cache.truncate("a", 6)
    with pytest.raises(ValueError, match="query_lens must have one entry per sequence, got 2 for"):
        cache.batch(["a"], [1, 1])
    with pytest.raises(ValueError, match=r"query_lens\[0\] must be between 0 and 5, got 6"):
        cache.batch(["a"], [6])
    assert type(cache.batch(["a"], torch.tensor([2])).max_seqlen_q) is int
    with pytest.raises(ValueError, match="max_pages must be at least 2, got 1"):
        cache.batch(["a"], [1], max_pages=1)
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        small_cache(page_size=0)


@pytest.mark.parametrize("value", [2.5, "2", None, [2]], ids=repr)
def test_numbers_that_are_no_integers(value):
    cache = small_cache()
    cache.append("a", 5)
    calls = {
        "PagedKVCache: num_layers": lambda: PagedKVCache(value, 8, 2, 4, 8),
        "PagedKVCache: num_pages": lambda: PagedKVCache(1, value, 2, 4, 8),
        "PagedKVCache: num_kv_heads": lambda: PagedKVCache(1, 8, value, 4, 8),
        "PagedKVCache: page_size": lambda: PagedKVCache(1, 8, 2, value, 8),
        "PagedKVCache: head_dim": lambda: PagedKVCache(1, 8, 2, 4, value),
        "truncate: length": lambda: cache.truncate("a", value),
        r"batch: query_lens\[0\]": lambda: cache.batch(["a"], [value]),
        "pages_for: a length": lambda: cache.pages_for([value], 4),
        "pages_for: page_size": lambda: cache.pages_for([5], value),
    }
    if value is not None:
        calls["free: written"] = lambda: cache.free("a", value)
        calls["batch: max_pages"] = lambda: cache.batch(["a"], [1], value)
    for what, call in calls.items():
        with pytest.raises(TypeError, match=f"{what} must be an integer, got "):
            call()
    assert cache.length("a") == 5


def test_integers_of_other_libraries():
    """A cache keeps plain integers: a tensor's would change what the next append computes."""
    cache = PagedKVCache(*map(torch.tensor, (1, 8, 2, 4, 8)))
    cache.append("a", list(range(7)))
    cache.truncate("a", torch.tensor(5))
    assert cache.append("a", [7, 8]) == 0
    cache.append("b", torch.tensor([0, 1, 2, 3, 9]))
    assert cache.pages("b")[0] == cache.pages("a")[0]
    assert type(cache.length("a")) is type(cache.page_size) is type(cache.num_pages) is int
    batch = cache.batch(["a"], torch.tensor([2]), max_pages=torch.tensor(3))
    assert type(batch.max_seqlen_q) is int and batch.block_table.shape == (1, 3)


def fill(num_pages):
    small_cache(num_pages=num_pages).append("a", 4 * num_pages + 1)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))]
)
def test_cache_full_is_copied(duplicate):
    full = CacheFull(3, 1)
    full.request = "r7"
    same = duplicate(full)
    assert type(same) is CacheFull
    assert (same.needed, same.available, same.request) == (3, 1, "r7")
    assert str(same) == str(full) == "the KV cache is full: 3 pages needed, 1 available"


def test_cache_full_leaves_a_process_pool():
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        for num_pages in (1, 2):
            with pytest.raises(CacheFull) as e:
                pool.submit(fill, num_pages).result(timeout=120)
            assert (e.value.needed, e.value.available) == (num_pages + 1, num_pages)


@pytest.mark.parametrize(
    "tokens", ["ab", b"ab", [[1], [2]], ["1"], [1.0], [2**63], 2.0, None], ids=repr
)
def test_tokens_that_are_no_ids(tokens):
    cache = small_cache(page_size=64)
    with pytest.raises(
        TypeError, match=r"append: tokens must be a number of tokens, or a seq.*got"
    ):
        cache.append("a", tokens)
    assert "a" not in cache
    assert cache.num_free_pages == 8


@pytest.mark.parametrize("written", [-5, -1, 6])
def test_written_is_checked(written):
    cache = small_cache()
    cache.append("a", list(range(5)))
    with pytest.raises(ValueError, match=f"free: written must be between 0 and 5, got {written}"):
        cache.free("a", written=written)
    assert cache.pages("a")
    assert cache.append("b", list(range(5))) == 4


def test_sizes_are_known_before_there_is_a_cache():
    lengths = [1, 16, 17, 0]
    pages = PagedKVCache.pages_for(lengths, page_size=16)
    assert pages == 1 + 1 + 2
    cache = PagedKVCache(3, pages, 2, 16, 8, dtype=torch.bfloat16)
    for i, length in enumerate(lengths):
        cache.append(i, length)
    assert cache.num_free_pages == 0
    token = PagedKVCache.bytes_per_token(3, 2, 8, dtype=torch.bfloat16)
    assert token * 16 * pages == cache.kv_cache.nbytes
