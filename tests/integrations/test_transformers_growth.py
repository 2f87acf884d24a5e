"""Kernels that growing loops of a model would compile on an H100; nothing is compiled here."""

import os

import growth_of_generate as loops
import pytest

# past two tiles of 64 keys; `make thorough` past three
MOST, STEPS = 4, 140 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 75


@pytest.fixture(scope="module")
def process():
    from cross_compile import workers

    with workers(1) as found:
        yield found


@pytest.mark.parametrize(
    "call",
    [
        (loops.generate, "dynamic", STEPS, False),
        (loops.generate, "dynamic", STEPS, True),
        (loops.generate, "static", STEPS, False),
        (loops.generate, "dynamic", STEPS, False, 37),
        (loops.verify, STEPS // loops.DRAFT),
        (loops.quantised, STEPS),
        (loops.batches, 24),
    ],
    ids=["dynamic", "padded", "static", "sliding", "guessed", "quantised", "batches"],
)
def test_no_length_is_compiled_in(call, process):
    from kernel_counts import counted_in

    kernels = counted_in(process, "sm90", *call)
    assert 0 < len(kernels) <= MOST, kernels.report()


def test_steps_of_a_cache_that_grows_are_one_kind(process):
    """Of the prompt and of its tokens: what is worked out for a kind takes longer than the rest."""
    assert process.submit(loops.kinds_of_generate, "sm90", 20).result() == 2
