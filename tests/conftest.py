"""Hypothesis profiles: `ci` is quick and repeatable, `thorough` draws other examples each time.

HYPOTHESIS_EXAMPLES is how many `thorough` draws for a test; `--hypothesis-seed` tells shards apart.
"""

import gc
import os

import pytest
import torch
from forks import Forks
from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "2000"))
COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", derandomize=True, max_examples=25, **COMMON)
settings.register_profile("brief", derandomize=True, max_examples=12, **COMMON)
settings.register_profile("dev", max_examples=50, **COMMON)
settings.register_profile("thorough", max_examples=EXAMPLES, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# Python looks for garbage after 700 new objects, which takes a twentieth of the suites
OBJECTS_OF_A_COLLECTION = 50_000

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"

# What the `thorough` profile alone runs and no mark says, by the folder of the tests: examples are
# fewer, cases drawn. Marked tests are counted; tests/backends says its own.
FEWER = {
    "tests/triton": (
        "test_cross_compile.py: most pairs of a call and a chip",
        "test_hopper.py: the compiling of shapes whose every option another one has",
        "test_shared_memory.py: most combinations",
        "test_hopper_backward.py: most ways to add up",
        "test_attention.py: most fuzzed plans",
    ),
    "tests/tpu": (
        "test_reshape_and_cache.py, test_attention.py: most ways of the DMAs",
        "test_attention.py: most fuzzed plans",
    ),
    "tests/distributed": (
        "test_worlds.py: worlds of two, but for what is theirs alone; most cuts of each scheme",
    ),
    "tests/neuron": (
        "test_attention.py: heads of which no stack fits; test_backward.py too: most fuzzed plans",
    ),
    "tests/packaging": ("test_symbols.py: objects without optimisation",),
    "tests/integrations": (
        "test_transformers_growth.py: steps behind the 75th",
        "test_transformers_training.py: a compiled decoder of two layers with a bias of positions,"
        " a compiled encoder of two with dropout",
    ),
}


# what runs the tests that `--sample` leaves out: the workflow does where their device's files have
# changed, and each night
DEVICE_SUITES = "make test-tpu-interpreted test-neuron test-triton-interpreted"


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "thorough(on_gpu=True): `make thorough` alone runs it, and a GPU, where kernels are quick",
    )
    config.addinivalue_line(
        "markers", "device_suite: with --sample, it is left to the suite of its device"
    )
    # of each kind, the tests that do not run now, by their file
    config.left_out = {"thorough": {}, "device_suite": {}}


def _is_left_to_thorough(item):
    mark = item.get_closest_marker("thorough")
    if mark is None or IS_THOROUGH:
        return False
    is_on_gpu = torch.cuda.is_available() and "triton" in item.path.parts
    return not (is_on_gpu and mark.kwargs.get("on_gpu", True))


def _why_left_out(config, item):
    """The kind of what is left out, or None of a test that runs."""
    if _is_left_to_thorough(item):
        return "thorough"
    is_sampled = config.getoption("--sample") and item.get_closest_marker("device_suite")
    return "device_suite" if is_sampled else None


def pytest_collection_modifyitems(config, items):
    unlike = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unlike:  # pytest-xdist's processes would collect different tests
        raise pytest.UsageError(f"an address is in the name of {unlike[0]}: give the case an id")
    kinds = [_why_left_out(config, item) for item in items]
    for item, kind in zip(items, kinds, strict=True):
        if kind is not None:
            file = item.nodeid.partition("::")[0]
            config.left_out[kind][file] = config.left_out[kind].get(file, 0) + 1
    pairs = list(zip(items, kinds, strict=True))
    config.hook.pytest_deselected(items=[item for item, kind in pairs if kind is not None])
    items[:] = [item for item, kind in pairs if kind is None]


@pytest.fixture(scope="session")
def programs():
    """Runs programs in processes of their own, which have imported torch and nothing else."""
    forks = Forks("torch")
    yield forks
    forks.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What imports and collecting make stays to the end, and is much: garbage is not looked for in
    it while it is made, nor by tests. What these make is seldom garbage that has to be looked for.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(OBJECTS_OF_A_COLLECTION)
        gc.enable()


def pytest_sessionfinish(session):
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left_out"] = session.config.left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Of pytest-xdist, whose workers alone know what was collected; each collects all of it."""
    for kind, counts in getattr(node, "workeroutput", {}).get("left_out", {}).items():
        node.config.left_out[kind].update(counts)


def pytest_terminal_summary(terminalreporter, config):
    ran = {r.nodeid.rpartition("/")[0] for r in terminalreporter.getreports("passed")}
    fewer = [f"{folder}: {'; '.join(what)}" for folder, what in FEWER.items() if folder in ran]
    counted = {
        kind: [f"{file}: {count} tests" for file, count in sorted(counts.items())]
        for kind, counts in config.left_out.items()
    }
    for title, lines in (
        ("left to HYPOTHESIS_PROFILE=thorough", [*fewer, *counted["thorough"]]),
        (f"left to the suites of the devices: {DEVICE_SUITES}", counted["device_suite"]),
    ):
        if lines and not IS_THOROUGH:
            terminalreporter.section(title)
            terminalreporter.write("\n".join([*lines, ""]))


def pytest_addoption(parser):
    parser.addoption(
        "--sample", action="store_true", help="as `make test`: without marks of device_suite"
    )
    parser.addoption(
        "--backend", action="append", default=[], help="what tests/backends runs on: see there"
    )
