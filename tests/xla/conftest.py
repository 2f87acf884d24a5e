"""torch_xla and torchax on the CPU, the kernels in Pallas' interpreter: `make test-xla`."""

import importlib.util
import os

os.environ["PJRT_DEVICE"] = "CPU"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PAGED_ATTN_TPU_INTERPRET"] = "1"
# compiled once each and run once: optimising takes longer than it saves
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

if importlib.util.find_spec("torch_xla") is None:
    collect_ignore_glob = ["test_*.py"]
