"""What a seeded fault is, and the tests that several of them name."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    """One replacement in one file; `old` is there once."""

    name: str
    file: str  # within backends/neuron
    old: str
    new: str
    tests: tuple[str, ...]  # arguments of pytest: what is to see it


def suite(which: str) -> tuple[str, ...]:
    """Tests of the conformance suite on generation 3, by a part of their names."""
    return "tests/backends", "--backend", "neuron-3", "-k", which


BYTES = ("tests/neuron/test_eight_bits.py",)
SHARED = "tests/neuron/test_attention.py", "-k", "share_ or beside_short"
LAUNCHES = "tests/neuron/test_backward.py", "-k", "not fuzzed"
MIXED = suite("test_agrees and llama3_8b/mixed/bf16")
