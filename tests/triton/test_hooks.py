"""Triton's hooks on compilation, by which engines watch for kernels that compile while serving."""

import cross_compile
import pytest
from compiled_calls import CALLS


def described_kernels(arch):
    """The kernels that Triton describes to a hook, none of which is compiled; and how many calls
    there were."""
    from triton import knobs

    described = []

    def hook(*, fn, **_):
        described.append(fn.name)
        return True

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
    try:
        with cross_compile.elsewhere(arch):
            for make in CALLS.values():
                make()()
    finally:
        knobs.runtime.jit_cache_hook = before
    return described


@pytest.mark.device_suite
def test_triton_can_describe_all_kernels_to_a_hook():
    """It writes constants as JSON, which knows numbers and texts, and raises for others."""
    with cross_compile.workers(1) as pool:
        described = pool.submit(described_kernels, "sm90").result()
    assert len(described) > len(CALLS)
    names = {name.rpartition(".")[2] for name in described}
    assert {
        "_attention_fwd_kernel",
        "_hopper_attention_fwd_kernel",
        "_attention_dq_kernel",
    } <= names
