"""Kernels for chips that are not here: registers stay registers, what is shared fits, and matrix
instructions do the work.

Every chip compiles half of the calls and every call is compiled for half of the chips; with the
`thorough` profile, all of them. `cross_compile.py` prints what other chips make of them.
"""

import os

import cross_compile
import pytest

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
# those whose tables of tiles have been through the whole matrix
CHIPS = ("sm80", "sm86", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "gfx950")
JOBS = [
    (arch, name)
    for i, arch in enumerate(CHIPS)
    for j, name in enumerate(cross_compile.CALLS)
    if IS_THOROUGH or (i + j) % 2 == 0
]


@pytest.fixture(scope="session")
def compiled(request):
    """What the tests of this session will ask for, by chip and call, compiled by all cores."""
    wanted = [
        tuple(item.callspec.params[key] for key in ("arch", "name"))
        for item in request.session.items
        if item.function is test_compiles_to_what_the_chip_has_room_for
    ]
    with cross_compile.workers(os.cpu_count()) as pool:
        yield {job: pool.submit(cross_compile.compile_call, *job) for job in wanted}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("arch, name", JOBS)
def test_compiles_to_what_the_chip_has_room_for(arch, name, compiled):
    kernels = compiled[arch, name].result()
    assert kernels
    for kernel in kernels:
        assert not kernel.faults(arch, name), kernel
