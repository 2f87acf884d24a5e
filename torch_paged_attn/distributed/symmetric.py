"""torch's symmetric memory: memory of one GPU that all GPUs of a group can read and write."""

import datetime
import importlib
import importlib.util
from typing import Any

import torch

from torch_paged_attn.ops.checks import refuse

# how long a kernel waits for another rank: the same as torch's NCCL collectives
TIMEOUT = datetime.timedelta(minutes=10)


def symmetric_memory(op: str, device: torch.device, instead: str) -> Any:
    """The module `torch.distributed._symmetric_memory`.

    Raises NotImplementedError if this torch or the device has no symmetric memory; `instead` says
    in the message what to do.
    """
    memory: Any = None
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is not None:
        memory = importlib.import_module("torch.distributed._symmetric_memory")
    missing = [name for name in ("empty", "rendezvous") if not hasattr(memory, name)]
    if device.type != "cuda" or missing:
        where = device if device.type != "cuda" else f"this torch, which has no {missing}"
        refuse(op, f"no symmetric memory on {where}", f"use {instead}")
    return memory
