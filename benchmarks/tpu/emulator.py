"""Execute a schedule: which bundles the core passes, and which DMAs it starts, for given tables.

The scalar core alone decides what a kernel does next, and all that it reads are lengths, tables and
semaphores. So its instructions are executed for real, on the real tables, and the vector slots of
every bundle passed are counted.

Exact, given the schedule: the bundles passed (all of them, empty ones included, and those issued,
that is the others), the number and the bytes of DMAs, and instructions per unit. Microseconds are
a model. It says that a bundle is a cycle, that the matrix units take so many rows a cycle, and that
DMAs pass HBM one after another at its full rate and arrive `DMA_LATENCY` later. It knows no queues
and no refresh; use it to compare schedules, not to promise times.

A value that comes out of vector registers is unknown here. It may be computed with; a branch, a
predicate or a DMA that depends on it is an error, and so is an instruction never seen before.
"""

import collections
import dataclasses
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from bundles import OBJECT_BITS, POINTER, Bundle, Instruction, Operand, pointer
from generations import Generation

DMA_LATENCY = 700e-9  # seconds; a guess, the same for every generation
MAX_BUNDLES = 100_000_000
WORD = 0xFFFFFFFF
_CORE_ID = "megacore core id"  # how libtpu remarks the load that tells a core which one it is


class EmulationError(RuntimeError):
    """The schedule does what cannot be followed here, or what the hardware would not survive."""


class _Unknown:
    """A number that only the vector unit knows: every result it has part in is unknown too."""

    def _unknown(self, *_others: Any) -> "_Unknown":
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _unknown
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _unknown
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _unknown
    __lt__ = __le__ = __gt__ = __ge__ = _unknown
    __eq__ = __ne__ = _unknown  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise EmulationError("a value out of vector registers decides what the kernel does")


UNKNOWN = _Unknown()


@dataclasses.dataclass
class Counts:
    """What one run of a kernel did."""

    bundles: int = 0  # all: the cycles of the schedule
    issued: int = 0  # without the empty ones
    dmas: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    dma_bytes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    units: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    matmul_rows: int = 0
    stall_cycles: float = 0.0  # modelled
    cores: int = 1

    @property
    def hbm_bytes(self) -> int:
        return sum(size for kind, size in self.dma_bytes.items() if "hbm" in kind)

    def microseconds(self, generation: Generation) -> float:
        """Modelled: issue and stalls, or the matrix units where these are the bottleneck."""
        matrix = self.matmul_rows / (generation.matrix_units * generation.rows_per_cycle)
        return max(self.bundles + self.stall_cycles, matrix) / (generation.clock_ghz * 1e3)

    def hbm_microseconds(self, generation: Generation) -> float:
        """Modelled: what the bytes take at the full rate of HBM."""
        return self.hbm_bytes / (generation.hbm_bytes_per_second * self.cores) * 1e6


def run(
    program: list[Bundle], generation: Generation, operands: Mapping[int, np.ndarray]
) -> Counts:
    """Execute `program`; `operands` are the kernel's tables, by their place among its arguments.

    Where the kernel is one of two cores' (v4, v5p), both run: bundles, stalls and matrix rows are
    those of the core with more bundles, DMAs and units of both together.
    """
    counts = _Machine(program, generation, operands, core=0).run()
    if any(_CORE_ID in slot.note for bundle in program for slot in bundle.scalar):
        other = _Machine(program, generation, operands, core=1).run()
        slower = max(counts, other, key=lambda core: core.bundles)
        counts = dataclasses.replace(
            slower,
            dmas=counts.dmas + other.dmas,
            dma_bytes=counts.dma_bytes + other.dma_bytes,
            units=counts.units + other.units,
            cores=2,
        )
    return counts


def _signed(value: Any) -> Any:
    """A register holds 32 bits; pointers are kept whole."""
    if not isinstance(value, int) or value >= POINTER >> 1:
        return value
    value &= WORD
    return value - (1 << 32) if value >> 31 else value


def _unsigned(value: Any) -> Any:
    return value & WORD if isinstance(value, int) and value < POINTER >> 1 else value


def _shift_right_logical(value: Any, places: Any) -> Any:
    return _unsigned(value) >> places


def _and(a: Any, b: Any) -> Any:
    # bounds checks clear a pointer's top bit, which ours do not have where the hardware's do
    for x in (a, b):
        if isinstance(x, int) and x >= POINTER >> 1:
            return x
    return a & b


def _of_unsigned(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(_unsigned(a), _unsigned(b))


def _smaller(a: Any, b: Any) -> Any:
    return a if a < b else b


def _larger(a: Any, b: Any) -> Any:
    return b if a < b else a


_COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip

# opcode up to its type -> function of its operands
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "smov": lambda a: a,
    "int_to_ptr": lambda a: a,
    "pmov": lambda a: a,
    "sadd": operator.add,
    "scalar_lea": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "smulhi.u32": lambda a, b: _unsigned(a) * _unsigned(b) >> 32,
    "sshll": operator.lshift,
    "sshllo": lambda a, b: a << b | (1 << b) - 1,  # ones come in from below
    "sshra": operator.rshift,
    "sshrl": _shift_right_logical,
    "sand": _and,
    "sor": operator.or_,
    "sxor": operator.xor,
    "smin": _smaller,
    "smax": _larger,
    "scalar_select": lambda condition, a, b: a if condition else b,
    "pneg": lambda a: not a,
    "pand": lambda a, b: bool(a) and bool(b),
    "por": lambda a, b: bool(a) or bool(b),
    "pxor": lambda a, b: bool(a) != bool(b),
    "pnand": lambda a, b: not (a and b),
    "pnor": lambda a, b: not (a or b),
    **{f"scmp.{name}": function for name, function in _COMPARE.items()},
    **{f"scmp.{name}.u32": _of_unsigned(function) for name, function in _COMPARE.items()},
    "smin.u32": _of_unsigned(_smaller),
    "smax.u32": _of_unsigned(_larger),
}

# ordering, tracing and phis of registers that stay where they are: nothing to execute
_NOTHING = ("sphi", "sfence", "cfence", "compiler", "vtrace", "sdelay", "snop")


def _function_of(opcode: str) -> Callable[..., Any] | None:
    parts = opcode.split(".")
    for length in (3, 2, 1):
        if function := _ARITHMETIC.get(".".join(parts[:length])):
            return function
    return None


def _kind_of(dma: Instruction) -> str:
    """From where to where: a `dma.general`, of more dimensions than the others, remarks it."""
    kind = dma.opcode.removeprefix("dma.")
    remark = re.search(r"/\* (\w+)-to-(\w+) \*/", dma.note)
    return "_to_".join(remark.groups()) if kind == "general" and remark else kind


class _Machine:
    def __init__(
        self,
        program: list[Bundle],
        generation: Generation,
        operands: Mapping[int, np.ndarray],
        core: int,
    ) -> None:
        self.program, self.generation, self.operands = program, generation, operands
        self.core = core
        self.registers: dict[str, Any] = collections.defaultdict(int)
        self.in_flight: dict[str, list[Any]] = {}  # results that a later pop takes
        self.smem: dict[int, int] = {}
        self.semaphores: collections.Counter[int] = collections.Counter()
        # semaphore -> (cycle of arrival, granules) of DMAs that have not been waited for
        self.arriving: dict[int, list[tuple[float, int]]] = collections.defaultdict(list)
        self.hbm_free_at = 0.0
        self.counts = Counts()
        self.functions = {
            instruction.opcode: _function_of(instruction.opcode)
            for bundle in program
            for instruction in bundle.scalar
        }

    @property
    def now(self) -> float:
        return self.counts.bundles + self.counts.stall_cycles

    def run(self) -> Counts:
        program, counts = self.program, self.counts
        passed = [0] * len(program)
        at, target, slots_left = 0, None, 0
        while at < len(program):
            counts.bundles += 1
            if counts.bundles > MAX_BUNDLES:
                raise EmulationError(f"still running after {MAX_BUNDLES} bundles")
            passed[at] += 1
            branch = self._issue(program[at].scalar) if program[at].scalar else None
            if branch is not None:
                if target is not None:
                    raise EmulationError(f"a branch in the delay slots of another, bundle {at:#x}")
                target, slots_left = branch, self.generation.delay_slots
            elif target is not None:
                slots_left -= 1
            at += 1
            if target is not None and slots_left == 0:
                at, target = target, None
        for bundle, times in zip(program, passed, strict=True):
            if not bundle.is_empty:
                counts.issued += times
            counts.matmul_rows += bundle.matmul_rows * times
            for unit, slots in bundle.units.items():
                counts.units[unit] += slots * times
        return counts

    def _value(self, operand: Operand) -> Any:
        value: Any = operand.constant
        for register in operand.registers:
            value = value + self.registers[register]
        return _signed(value)

    def _issue(self, scalar: list[Instruction]) -> int | None:
        """Execute one bundle's scalar slots; the bundle to branch to."""
        target, results = None, []  # every slot reads before any slot writes
        for slot in scalar:
            if slot.predicate and not self._holds(slot):
                if slot.otherwise is not None:
                    results.append((slot.result, self._value(slot.otherwise)))
                continue
            function = self.functions[slot.opcode]
            if function is not None:
                values = [self._value(operand) for operand in slot.operands]
                results.append((slot.result, _signed(function(*values))))
            elif slot.opcode == "sld":
                loaded = self.smem.get(self._value(slot.operands[0]), 0)
                results.append((slot.result, self.core if _CORE_ID in slot.note else loaded))
            elif slot.opcode.startswith("sbr"):
                target = slot.target
            else:
                self._other(slot, results)
        for name, value in results:
            if isinstance(name, int):
                self.smem[name] = value
            else:
                self.registers[name] = value
        return target

    def _holds(self, slot: Instruction) -> bool:
        predicate = self.registers[slot.predicate]
        # an assertion about vectors, and what it would report, are taken as met
        if predicate is UNKNOWN and slot.opcode.startswith(("shalt", "sst")):
            return False
        return bool(predicate) != slot.negated

    def _other(self, slot: Instruction, results: list[tuple[Any, Any]]) -> None:
        opcode = slot.opcode
        values = [self._value(operand) for operand in slot.operands]
        if opcode == "sst":
            results.append((values[0], values[1]))
        elif opcode == "dma.done.wait":
            self._wait(*values)
        elif opcode.startswith("dma."):
            self._start_dma(_kind_of(slot), *values[:4])
        elif opcode == "vsyncadd":
            self.semaphores[values[0]] += values[1]
        elif opcode == "vsyncpa":
            self.semaphores[values[0]] = values[1]
        elif opcode == "vsyncmov":
            arriving = sum(granules for _, granules in self.arriving[values[0]])
            self.in_flight[slot.result] = [self.semaphores[values[0]] + arriving]
        elif opcode.startswith("sdivrem"):
            quotient, remainder = divmod(_unsigned(values[0]), _unsigned(values[1]))
            popped = {"kDiv": [quotient], "kRem": [remainder], "kDivAndRem": [quotient, remainder]}
            self.in_flight[slot.result] = popped[slot.note.strip("/* ")]
        elif opcode.startswith("spop"):
            # the value in flight is named where it was pushed; vectors push what is unknown
            pushed = self.in_flight.get(slot.operands[0].registers[0])
            results.append((slot.result, pushed.pop(0) if pushed else UNKNOWN))
        elif opcode.startswith("inlined_call_operand"):
            # operands are there before the first bundle, whose other slots may take their registers
            results.insert(0, (slot.result, self._operand(opcode, values)))
        elif opcode.startswith("shalt"):
            raise EmulationError(f"the kernel halts: {slot.note}")
        elif not opcode.startswith(_NOTHING):
            raise EmulationError(f"{opcode} is not known")

    def _operand(self, opcode: str, values: list[int]) -> Any:
        """Where an argument of the kernel lies, or its value where it is passed as one number."""
        if opcode.endswith("operand."):  # "<no memory space>"
            return int(np.ravel(self.operands[values[0]])[0])
        # "inlined_call_operand" alone is a constant that XLA put in
        return pointer(values[0]) if values else UNKNOWN

    def _start_dma(self, kind: str, source: int, granules: int, to: int, semaphore: int) -> None:
        size = granules * self.generation.granule_bytes
        self.counts.dmas[kind] += 1
        self.counts.dma_bytes[kind] += size
        if kind.endswith("_to_smem"):
            self._fill_smem(source, size, to)
        cycles = size / self.generation.hbm_bytes_per_cycle if "hbm" in kind else 0.0
        self.hbm_free_at = max(self.now, self.hbm_free_at) + cycles
        latency = DMA_LATENCY * self.generation.clock_ghz * 1e9
        self.arriving[semaphore].append((self.hbm_free_at + latency, granules))

    def _fill_smem(self, source: int, size: int, to: int) -> None:
        """Bring a table, or a window of one, to the scalar core's memory."""
        # some generations count HBM in words of 16 granules and shift the pointer before the DMA
        shift = source.bit_length() - POINTER.bit_length()
        thing, offset = divmod(source - (POINTER << shift), 1 << (OBJECT_BITS + shift))
        table = np.ravel(np.asarray(self.operands[thing])).astype(np.int64)
        first = offset * self.generation.granule_bytes // 4
        for i, word in enumerate(table[first : first + size // 4].tolist()):
            self.smem[to + i] = word

    def _wait(self, semaphore: int, needed: int) -> None:
        arriving = sorted(self.arriving[semaphore], reverse=True)
        until = self.now
        while self.semaphores[semaphore] < needed:
            if not arriving:
                raise EmulationError(f"deadlock: a semaphore waits for {needed} granules")
            arrival, granules = arriving.pop()
            self.semaphores[semaphore] += granules
            until = max(until, arrival)
        self.arriving[semaphore] = arriving
        self.counts.stall_cycles += max(0.0, until - self.now)
