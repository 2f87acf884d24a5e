"""The TPU kernels on the CPU, in Pallas' TPU interpreter."""

import faulthandler
import importlib.util
import os

import pytest
from on_cpu import choose_cpu

choose_cpu()

if importlib.util.find_spec("jax") is None:
    collect_ignore_glob = ["test_*.py"]

# a DMA that is waited for and never started blocks a thread of C++
LONGEST = 3600 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 240


@pytest.fixture(autouse=True)
def no_deadlock():
    """A test that hangs ends the process, and says where."""
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def run():
    """Run a `Call` on the backend, watched in one or both DMA modes."""
    from jax_arrays import rng_words, to_jax, to_torch
    from pallas_oracle import watch

    from torch_paged_attn.backends.tpu import functions
    from torch_paged_attn.backends.tpu.tile_sizes import Config

    # blocks and tiles so small that short sequences have several
    small = Config(block_k=256, step_k=128, tile_rows=64)

    def run(call, *dma_modes, **changes):
        args = {name: to_jax(value) for name, value in call.args.items()}
        if args.get("rng_state") is not None:
            args["rng_state"] = rng_words(call.args["rng_state"])
        args = {"config": small} | args | changes
        op = getattr(functions, call.op)
        return tuple(to_torch(x) for x in watch(lambda i: op(**args, interpret=i), *dma_modes))

    return run
