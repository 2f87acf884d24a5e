"""torch_tpu without a TPU: what a process that has renamed PrivateUse1 says of the ops."""

import importlib.util

if importlib.util.find_spec("torch_tpu") is None:
    collect_ignore_glob = ["test_*.py"]
