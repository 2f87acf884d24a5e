"""Hugging Face programs on hub kernels: `make test-hub`, in an environment of its own."""

import importlib.util

if importlib.util.find_spec("kernels") is None:
    collect_ignore_glob = ["test_*.py"]
