"""One rank of `distributed.py`: its device, its numbers, and how calls are timed on all ranks."""

import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_paged_attn.distributed.ranks import Ranks

ROUNDS = 9


class Machine:
    """This rank, and how things are timed on it."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cpu") if dry else torch.device("cuda", local)
        if not dry:
            torch.cuda.set_device(self.device)
        dist.init_process_group("gloo" if dry else "nccl")
        self.ranks = Ranks.of("benchmark")
        self.dtype = torch.float32 if dry else torch.bfloat16

    def say(self, *words: Any) -> None:
        if self.rank == 0:
            print(*words, flush=True)

    def slowest(self, seconds: float) -> float:
        found = torch.tensor(seconds, device=self.device, dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.item()

    def randn(self, *shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        g = torch.Generator(self.device).manual_seed(seed)
        x = torch.randn(shape, device=self.device, generator=g, dtype=dtype or self.dtype)
        return x

    def seconds(self, call: Callable[[], Any], calls: int) -> float:
        """Of one call, on this rank."""
        if self.dry:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / calls

    def times(self, calls: dict[str, Callable[[], Any]], number: int) -> dict[str, float]:
        """The slowest rank's seconds of each, taking turns in drawn orders: who comes after a call
        that heats the chip finds it slower."""
        for call in calls.values():
            call()
            call()
        found: dict[str, list[float]] = {name: [] for name in calls}
        for number_of_round in range(1 if self.dry else ROUNDS):
            for name in random.Random(number_of_round).sample(list(calls), len(calls)):
                call = calls[name]
                dist.barrier()
                call()  # ranks come here one after the other
                found[name].append(self.slowest(self.seconds(call, number)))
        return {name: statistics.median(seconds) for name, seconds in found.items()}

    def captured(self, call: Callable[[], Any], number: int = 1) -> Callable[[], Any]:
        """Calls in a CUDA graph."""
        if self.dry:
            return call
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(number):
                call()
        self.graphs = [*getattr(self, "graphs", []), graph]
        return graph.replay
