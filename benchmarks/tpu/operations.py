"""What XLA does around the kernels: the operations of an optimised module, with its own estimates.

Both are read from what libtpu dumps, because `compiled.as_text()` fails for a module that offloads
gathers to the SparseCore (libtpu 0.0.51): the operations from the module, the estimates from the
analysis of its schedule, which names each operation that has code.

A TPU runs the entry computation's operations one after the other, so their costs add up. XLA notes
an estimate in cycles with most of them; sorts, scatters, some gathers and asynchronous copies have
none and are counted apart. A loop's body counts as often as XLA knows that it runs, or once.
"""

import dataclasses
import math
import re

# these move nothing: names, views, constants, the ends of copies whose start is counted
_FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "copy-done", "slice-done",
    "async-done", "async-update", "after-all", "iota", "partition-id",
    # what runs on the SparseCore has its result where it ends: custom-call-done is counted
    "custom-call-start", "custom-call-update",
}  # fmt: skip

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^ +(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\("
    r"(?P<operands>[^)]*)\)(?P<rest>.*)$"
)
_SCHEDULED = re.compile(r"scheduled bundles \([^)]*\): %(?P<name>[\w.\-]+) = (?P<rest>.*)")
_ARRAY = re.compile(
    r"\b(?P<dtype>pred|[a-z]+\d+\w*)\[(?P<sizes>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?"
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
KERNEL = 'custom_call_target="tpu_custom_call"'


@dataclasses.dataclass(frozen=True)
class Operation:
    name: str
    opcode: str
    type: str  # of the result, with its layout
    cycles: int | None  # XLA's estimate, of all turns of the loop it stands in
    result_bytes: int

    @property
    def is_kernel(self) -> bool:
        return self.opcode == "kernel"


def read_operations(hlo: str, analysis: str) -> list[Operation]:
    """The operations that a module runs, kernels included, those that are free not.

    `hlo` and `analysis` are what `aot.dumped_module` returns.
    """
    estimates = {line["name"]: line["rest"] for line in _SCHEDULED.finditer(analysis)}
    computations: dict[str, list[re.Match[str]]] = {}
    entry, current = "", ""
    for line in hlo.splitlines():
        if (head := _COMPUTATION.match(line)) is not None:
            current = head["name"]
            computations[current] = []
            entry = current if head["entry"] else entry
        elif current and (instruction := _INSTRUCTION.match(line)) is not None:
            computations[current].append(instruction)
    return _operations(computations, entry, 1, estimates)


def _operations(
    computations: dict[str, list[re.Match[str]]], name: str, times: int, estimates: dict[str, str]
) -> "Operations":
    found: Operations = []
    for instruction in computations[name]:
        opcode, rest = instruction["opcode"], instruction["rest"]
        if opcode in _FREE:
            continue
        if opcode in ("while", "call", "conditional"):
            trips = _TRIPS.search(rest)
            inner = times * (int(trips[1]) if trips else 1)
            for body in re.findall(r"(?:body|to_apply|_computation)=%([\w.\-]+)", rest):
                found += _operations(computations, body, inner, estimates)
            continue
        if opcode == "custom-call":
            if KERNEL not in rest:
                continue  # a hint or an allocation
            opcode = "kernel"
        cycles = _CYCLES.search(rest) or _CYCLES.search(estimates.get(instruction["name"], ""))
        found.append(
            Operation(
                name=instruction["name"],
                opcode=opcode,
                type=instruction["type"],
                cycles=None if cycles is None else int(cycles[1]) * times,
                result_bytes=bytes_of(instruction["type"]),
            )
        )
    return found


Operations = list[Operation]


def bytes_of(text: str) -> int:
    """Bytes of the arrays that a type names, without the padding of their tiles."""
    return sum(
        math.prod(int(size) for size in array["sizes"].split(",") if size) * _width(array["dtype"])
        for array in _ARRAY.finditer(text)
    )


def _width(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else max(1, int(bits[0]) // 8)
