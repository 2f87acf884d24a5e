"""The emulated NeuronCore: its limits, what is allocated on it, and what it has executed."""

import collections
import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

PARTITIONS = 128
PSUM_BANKS = 8
PSUM_BANK_BYTES = 2048

# bytes of SBUF that a kernel may use in each partition, by generation
SBUF_BYTES = {2: 192 * 1024, 3: 208 * 1024, 4: 240 * 1024}


class Violation(Exception):
    """A program did what the hardware or the documentation does not allow."""


def require(condition: bool, message: str) -> None:
    """Raise Violation with `message` unless `condition` holds.

    A message with numbers in it is made whether it is needed or not, for longer than most checks
    take: what every instruction checks raises by itself.
    """
    if not condition:
        raise Violation(message)


class Transfer(NamedTuple):
    """One DMA: how many bytes, and how many of them lie together in HBM."""

    num_bytes: int
    descriptor_bytes: int
    on_chip: bool = False  # from SBUF to SBUF


class Machine:
    """One generation of NeuronCore. Counters span everything run on it."""

    def __init__(self, generation: int = 3) -> None:
        require(generation in SBUF_BYTES, f"generation {generation}; allowed: 2, 3, 4")
        self.generation = generation
        self.capacity = {"sbuf": SBUF_BYTES[generation], "psum": PSUM_BANKS * PSUM_BANK_BYTES}
        self.live = {"sbuf": 0, "psum": 0}
        self.peak = {"sbuf": 0, "psum": 0}
        self.instructions: collections.Counter[tuple[str, str]] = collections.Counter()
        self.transfers: list[Transfer] = []
        self.tensor_columns = 0  # that moved through TensorE, about one a cycle
        # the logical core's programs: which one runs, and what they have allocated together
        self.program_id = 0
        self.num_programs = 1
        self.shared: list[Any] = []
        self.num_shared = 0
        self.trips: dict[int, list[int]] = {}  # of each program's dynamic loops
        # what ScalarE accumulates from one activation to the next
        self.reduce_registers: Any = None

    def count(self, engine: str, instruction: str) -> None:
        """One more instruction on `engine`."""
        self.instructions[engine, instruction] += 1

    def allocate(self, memory: str, num_bytes: int) -> None:
        """Take `num_bytes` of every partition."""
        self.live[memory] += num_bytes
        self.peak[memory] = max(self.peak[memory], self.live[memory])
        if self.live[memory] > self.capacity[memory]:
            taken = self.live[memory]
            raise Violation(
                f"{memory} holds {self.capacity[memory]} bytes a partition; {taken} asked for"
            )

    def release(self, memory: str, num_bytes: int) -> None:
        """Give them back."""
        self.live[memory] -= num_bytes


# the names that NKI's own switch takes
TARGETS = {"trn1": 2, "inf2": 2, "gen2": 2, "trn2": 3, "gen3": 3, "trn3": 4, "gen4": 4}

_machines = [Machine(TARGETS[os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "gen3")])]


def machine() -> Machine:
    """The machine that instructions run on."""
    return _machines[-1]


@contextlib.contextmanager
def emulated(generation: int = 3) -> Iterator[Machine]:
    """Run what is inside on a fresh machine of one generation: 2 (Trn1, Inf2), 3, 4."""
    _machines.append(Machine(generation))
    try:
        yield _machines[-1]
    finally:
        _machines.pop()
