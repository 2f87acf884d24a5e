"""Kernels for chips that are not here: registers stay registers, what is shared fits, and matrix
instructions do the work.

Every chip compiles a third of the calls and every call is compiled for a third of the chips; with
the `thorough` profile, all of them. `cross_compile.py` prints what other chips make of them.
"""

import collections
import contextlib
import functools
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
    """By chip, what its tests will ask for: by call, compiled by all cores."""
    wanted = collections.defaultdict(list)
    for item in request.session.items:
        if item.function is test_compiles_to_what_the_chip_has_room_for:
            wanted[item.callspec.params["arch"]].append(item.callspec.params["name"])
    with contextlib.ExitStack() as processes:

        @functools.cache
        def of_chip(arch):
            processes.close()
            pool = cross_compile.workers(os.cpu_count())
            processes.callback(pool.shutdown, cancel_futures=True)
            compile_call = functools.partial(cross_compile.compile_call, arch)
            return {name: pool.submit(compile_call, name) for name in wanted[arch]}

        yield of_chip


@pytest.mark.parametrize("arch, name", JOBS)
def test_compiles_to_what_the_chip_has_room_for(arch, name, compiled):
    kernels = compiled(arch)[name].result()
    assert kernels
    for kernel in kernels:
        assert not kernel.faults(arch, name), kernel


@pytest.mark.parametrize("arch", cross_compile.CHIPS)
def test_every_entry_of_a_table_is_compiled(arch):
    with cross_compile.workers(1) as pool:
        taken, entries = pool.submit(fit_tiles.entries_of, arch).result()
    assert set(taken) == set(entries)
