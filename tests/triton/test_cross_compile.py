"""Kernels for chips that are not here: registers stay registers, what is shared fits, and matrix
instructions do the work.

Every chip compiles a third of the calls and every call is compiled for a third of the chips; with
the `thorough` profile, all of them. `cross_compile.py` prints what other chips make of them.
"""

import os

import cross_compile
import fit_tiles
import pytest

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
JOBS = [
    (arch, name)
    for i, arch in enumerate(cross_compile.CHIPS)
    for j, name in enumerate(cross_compile.CALLS)
    if IS_THOROUGH or (i + j) % 3 == 0
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


@pytest.mark.parametrize("arch", cross_compile.CHIPS)
def test_every_entry_of_a_table_is_compiled(arch):
    with cross_compile.workers(1) as pool:
        taken, entries = pool.submit(fit_tiles.entries_of, arch).result()
    assert set(taken) == set(entries)
