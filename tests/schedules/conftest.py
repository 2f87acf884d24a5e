"""The TPU compiler's schedules, and the tool that executes them: libtpu, but no TPU, is needed."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("libtpu") is None or importlib.util.find_spec("jax") is None:
    collect_ignore_glob = ["test_*.py"]

# the tools are scripts: they import one another as the top-level modules beside run.py
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "tpu"))
