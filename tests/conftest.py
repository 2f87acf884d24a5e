"""Hypothesis profiles: `ci` is quick and repeatable, `thorough` draws other examples each time.

HYPOTHESIS_EXAMPLES is how many `thorough` draws for a test; `--hypothesis-seed` tells shards apart.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "2000"))
COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", derandomize=True, max_examples=60, **COMMON)
settings.register_profile("brief", derandomize=True, max_examples=25, **COMMON)
settings.register_profile("dev", max_examples=50, **COMMON)
settings.register_profile("thorough", max_examples=EXAMPLES, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


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
    "tests/distributed": ("test_worlds.py: worlds of two, but for what is theirs alone",),
    "tests/neuron": (
        "test_attention.py: heads of which no stack fits; test_backward.py too: most fuzzed plans",
    ),
    "tests/packaging": ("test_build.py: other compilers than the first, and whole objects",),
}


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "thorough: `make thorough` alone runs it, and a GPU, where kernels are quick"
    )
    config.left_out = {}  # tests with that mark by their file, which do not run now


def pytest_collection_modifyitems(config, items):
    if IS_THOROUGH:
        return
    marked = [item for item in items if item.get_closest_marker("thorough") is not None]
    if torch.cuda.is_available():
        marked = [item for item in marked if "triton" not in item.path.parts]
    for item in marked:
        file = item.nodeid.partition("::")[0]
        config.left_out[file] = config.left_out.get(file, 0) + 1
    config.hook.pytest_deselected(items=marked)
    items[:] = [item for item in items if item not in marked]


def pytest_sessionfinish(session):
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left_out"] = session.config.left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Of pytest-xdist, whose workers alone know what was collected; each collects all of it."""
    node.config.left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter, config):
    if IS_THOROUGH:
        return
    ran = {r.nodeid.rpartition("/")[0] for r in terminalreporter.getreports("passed")}
    lines = [f"{folder}: {'; '.join(what)}" for folder, what in FEWER.items() if folder in ran]
    lines += [f"{file}: {count} tests" for file, count in sorted(config.left_out.items())]
    if lines:
        terminalreporter.section("left to HYPOTHESIS_PROFILE=thorough")
        terminalreporter.write("\n".join([*lines, ""]))


def pytest_addoption(parser):
    parser.addoption(
        "--backend", action="append", default=[], help="what tests/backends runs on: see there"
    )
