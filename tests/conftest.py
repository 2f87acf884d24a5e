"""Hypothesis profiles: `ci` is quick and repeatable, `thorough` draws other examples each time.

HYPOTHESIS_EXAMPLES is how many `thorough` draws for a test; `--hypothesis-seed` tells shards apart.
"""

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "2000"))
COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", derandomize=True, max_examples=100, **COMMON)
settings.register_profile("brief", derandomize=True, max_examples=25, **COMMON)
settings.register_profile("dev", max_examples=50, **COMMON)
settings.register_profile("thorough", max_examples=EXAMPLES, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# what the `thorough` profile alone runs, by the folder of the tests; tests/backends says its own
THOROUGH_ALONE = {
    "tests/triton": (
        "test_cross_compile.py: most pairs of a call and a chip",
        "test_hopper.py: the compiling of shapes whose every option another one has",
        "test_shared_memory.py: most combinations",
        "test_hopper_backward.py: most ways to add up",
        "test_attention.py: most fuzzed plans",
    ),
    "tests/tpu": (
        "test_reshape_and_cache.py: most cases with the DMAs run as they start, one more kind",
        "test_attention.py: most fuzzed plans, a cache passed whole to two launches, mixed batches "
        "in steps of several pieces, two cores by the other way of the DMAs",
        "test_bias.py: low biases in 16 bits; test_packed_rows.py: rows of two keys, groups of 4",
        "test_oracle.py, test_binding.py: half of the combinations",
    ),
    "tests/neuron": (
        "test_attention.py: heads of which no stack fits; test_backward.py too: most fuzzed plans",
    ),
    "tests/packaging": ("test_build.py: other compilers than the first, and whole objects",),
}


def pytest_terminal_summary(terminalreporter, config):
    if os.environ.get("HYPOTHESIS_PROFILE") == "thorough":
        return
    ran = {r.nodeid.rpartition("/")[0] for r in terminalreporter.getreports("passed")}
    if left_out := [(folder, what) for folder, what in THOROUGH_ALONE.items() if folder in ran]:
        terminalreporter.section("left to HYPOTHESIS_PROFILE=thorough")
        for folder, what in left_out:
            terminalreporter.write_line(f"{folder}: {'; '.join(what)}")


def pytest_addoption(parser):
    parser.addoption(
        "--backend", action="append", default=[], help="what tests/backends runs on: see there"
    )
