"""SGLang's classes on our backend, in an environment made by hand.

SGLang's wheel without its dependencies (`pip install --no-deps sglang==0.5.23`), which are for
CUDA, and of these what its imports then ask for; then
`pytest --confcutdir tests/sglang tests/sglang`. The operators of torchvision 0.28's wheel are for
CUDA only: an empty `_meta_registrations.py` in it lets a CPU import the rest.
"""

import importlib.util

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
