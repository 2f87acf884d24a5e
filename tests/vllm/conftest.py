"""vLLM's engine on its plugin: `make test-vllm`, in an environment of its own."""

import importlib.util

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
