"""Kernels that growing loops of a model would compile on an H100; nothing is compiled here."""

import growth_of_generate as loops
import pytest

MOST, STEPS = 6, 200


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
def test_no_length_is_compiled_in(call):
    from kernel_counts import in_process

    kernels = in_process("sm90", *call)
    assert 0 < len(kernels) <= MOST, kernels.report()
