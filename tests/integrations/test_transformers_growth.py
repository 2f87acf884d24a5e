"""Kernels that growing loops of a model would compile on an H100; nothing is compiled here."""

import growth_of_generate as loops
import pytest

MOST, STEPS = 6, 200


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
        (loops.verify, STEPS),
    ],
    ids=["dynamic", "padded", "static", "sliding", "guessed"],
)
def test_no_length_is_compiled_in(call, process):
    from kernel_counts import counted_in

    kernels = counted_in(process, "sm90", *call)
    assert 0 < len(kernels) <= MOST, kernels.report()
