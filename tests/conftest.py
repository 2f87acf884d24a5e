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


def pytest_addoption(parser):
    parser.addoption(
        "--backend", action="append", default=[], help="what tests/backends runs on: see there"
    )
