"""Memory that all GPUs of a group see, where this torch has it."""

import datetime
import importlib
import importlib.util
from typing import Any

import torch

from torch_paged_attn.ops.checks import fail

# how long a rank waits for another one in a kernel: as torch's collectives of GPUs do
TIMEOUT = datetime.timedelta(minutes=10)


def symmetric_memory(op: str, device: torch.device, instead: str) -> Any:
    """torch's module; raises NotImplementedError, which says what to do instead, if there is none
    for the device.
    """
    memory: Any = None
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is not None:
        memory = importlib.import_module("torch.distributed._symmetric_memory")
    missing = [name for name in ("empty", "rendezvous") if not hasattr(memory, name)]
    if device.type != "cuda" or missing:
        came = f"is {device}" if device.type != "cuda" else f"is cuda, and torch has no {missing}"
        allowed = f"a GPU, with a torch that has symmetric memory; or {instead}"
        fail(op, "device", came, allowed, NotImplementedError)
    return memory
