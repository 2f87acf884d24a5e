"""diffusers' models on ours: `make test-diffusers`, in an environment of its own."""

import importlib.util

if importlib.util.find_spec("diffusers") is None:
    collect_ignore_glob = ["test_*.py"]
