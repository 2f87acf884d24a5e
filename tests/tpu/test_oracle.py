"""Bugs put into the loader of keys and values are seen by the oracle, each in the way it shows. All
other tests say that it is silent about the kernel as it is.
"""

import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax_arrays import to_jax, to_torch
from pallas_oracle import observe

from torch_paged_attn.backends.tpu.attention import attend
from torch_paged_attn.backends.tpu.functions import flash_varlen
from torch_paged_attn.backends.tpu.kernels.kv_pipeline import KvLoader
from torch_paged_attn.backends.tpu.tile_sizes import Config
from torch_paged_attn.testing import PROBLEMS, assert_accurate, build

CALL = build(PROBLEMS["llama3_8b/decode_b5/bf16"])


def modes(shown, other):
    """The way of the DMAs in which a bug shows most, and the other one."""
    return "dma_mode", [shown, pytest.param(other, marks=pytest.mark.thorough)]


def attended(dma_mode):
    """The result of `CALL`, and the oracle's complaints."""
    args = {name: to_jax(value) for name, value in CALL.args.items()}
    config = Config(block_k=256, step_k=128)
    forget_kernels()
    results, complaints = observe(
        lambda interpret: flash_varlen(**args, config=config, interpret=interpret), dma_mode
    )
    return [to_torch(x) for x in results], complaints


def forget_kernels():
    """Have kernels traced anew, with whatever was put into them."""
    for function in (flash_varlen, attend):
        function.clear_cache()


@pytest.fixture(autouse=True)
def forget_seeded_kernels():
    yield
    forget_kernels()


@pytest.mark.device_suite
@pytest.mark.parametrize(*modes("on_wait", "eager"))
def test_sees_a_wait_that_was_dropped(dma_mode, monkeypatch):
    def wait_for_keys_only(self, tile, block, slot):
        first, stop = self._live_pages(tile, block)
        for i in range(self.pages):

            @pl.when((i >= first) & (i < stop))
            def _(i=i):
                self._copies(0, slot, i)[0].wait()

    monkeypatch.setattr(KvLoader, "_wait", wait_for_keys_only)
    results, complaints = attended(dma_mode)
    if dma_mode == "on_wait":  # the copy was never made
        assert results[0].isnan().any()
    else:  # it was made in time, and was not noted
        assert any("non-zero count" in line for line in complaints)


@pytest.mark.device_suite
@pytest.mark.parametrize(*modes("eager", "on_wait"))
def test_sees_a_buffer_that_is_overwritten_while_it_is_read(dma_mode, monkeypatch):
    def copies(self, page, slot, i):
        k_done, v_done = self.refs.semaphores.at[0, slot], self.refs.semaphores.at[1, slot]
        wrong = lax.rem(slot + 1, self.num_buffers)
        return (
            pltpu.make_async_copy(
                self.refs.k_hbm.at[page], self.refs.k_buffers.at[wrong, i], k_done
            ),
            pltpu.make_async_copy(
                self.refs.v_hbm.at[page], self.refs.v_buffers.at[slot, i], v_done
            ),
        )

    monkeypatch.setattr(KvLoader, "_copies", copies)
    results, complaints = attended(dma_mode)
    assert any("RACE DETECTED" in line for line in complaints)
    with pytest.raises(AssertionError):
        assert_accurate(*results, CALL.truth())
