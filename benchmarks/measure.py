"""Interleaved timing on a machine that others may be using, and what the machine itself can do.

Contenders take turns (A, B, A, B, ...), so that a slow second hurts them all alike. Every sample
holds wall time and the process's CPU time. With one thread the smallest CPU time counts: being
descheduled does not show in it. With more, spinning at barriers is CPU time too, so the median wall
time counts, of those samples during which the process had its cores to itself; without enough of
them a timing is marked as busy and should not be quoted.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

# a sample lasts at least this long: short calls are repeated within it
MIN_SAMPLE_SECONDS = 5e-3
MIN_ROUNDS = 3
MAX_ROUNDS = 400
UNDISTURBED = 0.9  # the share of its cores' time that a process had in an undisturbed sample


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds of one call."""

    wall: float
    cpu: float


# runs a call `number` times and says what one of them took; here, or in another process
Sampler = Callable[[int], Sample]


def sampler(call: Callable[[], Any]) -> Sampler:
    """A sampler that runs `call` in this process."""

    def sample(number: int) -> Sample:
        if number > 1:
            call()  # short calls are timed with their own data in the caches, not the last one's
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(number):
            call()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return Sample(wall / number, cpu / number)

    return sample


@dataclasses.dataclass(frozen=True)
class Timing:
    """What the samples of one contender say, in seconds."""

    cpu: float  # smallest
    wall: float  # median of the undisturbed samples
    wall_spread: float  # their interquartile range over their median
    rounds: int
    undisturbed: int
    threads: int

    @classmethod
    def of(cls, samples: list[Sample], threads: int) -> "Timing":
        undisturbed = [s.wall for s in samples if s.cpu >= UNDISTURBED * threads * s.wall]
        walls = undisturbed if len(undisturbed) >= MIN_ROUNDS else [s.wall for s in samples]
        low, wall, high = statistics.quantiles(walls, n=4, method="inclusive")
        cpu = min(s.cpu for s in samples)
        return cls(cpu, wall, (high - low) / wall, len(samples), len(undisturbed), threads)

    @property
    def seconds(self) -> float:
        """The number to quote: CPU time with one thread, wall time with more."""
        return self.cpu if self.threads == 1 else self.wall

    @property
    def busy(self) -> bool:
        """Whether others used the cores so much that `seconds` is an upper bound at best."""
        return self.threads > 1 and self.undisturbed < MIN_ROUNDS


def interleave(samplers: Mapping[str, Sampler], seconds: float, threads: int) -> dict[str, Timing]:
    """Let the contenders take turns until each has had about `seconds` of the time.

    A slow contender stops early, but never before it has been sampled MIN_ROUNDS times.
    """
    numbers = {}
    for name, sample in samplers.items():
        sample(1)
        numbers[name] = max(1, math.ceil(MIN_SAMPLE_SECONDS / sample(1).wall))
    samples: dict[str, list[Sample]] = {name: [] for name in samplers}
    spent = dict.fromkeys(samplers, 0.0)
    racing = list(samplers)
    while racing:
        for name in racing:
            start = time.perf_counter()
            samples[name].append(samplers[name](numbers[name]))
            spent[name] += time.perf_counter() - start
        racing = [
            name
            for name in racing
            if len(samples[name]) < MIN_ROUNDS
            or (spent[name] < seconds and len(samples[name]) < MAX_ROUNDS)
        ]
    return {name: Timing.of(taken, threads) for name, taken in samples.items()}


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """Something simple that the machine cannot do faster, and how much of it one call does."""

    name: str
    call: Callable[[], Any]
    work: float  # bytes or floating-point operations


def read_ceiling(num_bytes: int) -> Ceiling:
    """Add up a buffer: of torch's reductions, `sum` reads fastest."""
    buffer = torch.ones(max(1, num_bytes // 4))
    return Ceiling("read", buffer.sum, buffer.nbytes)


def copy_ceiling(num_bytes: int, places: int) -> Ceiling:
    """Copy a buffer, to as many places in turn; reads and writes both count."""
    source = torch.ones(max(1, num_bytes // 4))
    targets = itertools.cycle(torch.ones(places, len(source)))
    return Ceiling("copy", lambda: next(targets).copy_(source), 2 * source.nbytes)


def matmul_ceiling(dtype: torch.dtype, size: int = 1024) -> Ceiling:
    """Multiply square matrices; float16 in float32, which is far faster on most CPUs.

    By torch.matmul or oneDNN, whichever is faster: for float32 the former calls MKL, which leaves
    half of the vector units idle on some CPUs.
    """
    compute = torch.float32 if dtype == torch.float16 else dtype
    a, b = torch.randn(2, size, size).to(compute)
    calls: list[Callable[[], Any]] = [lambda: a @ b]
    if torch.backends.mkldnn.is_available():
        calls.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
    fastest = min(calls, key=lambda call: sampler(call)(3).cpu)
    name = f"matmul {str(compute).removeprefix('torch.')}"
    return Ceiling(name, fastest, 2 * size**3)
