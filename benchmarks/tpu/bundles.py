"""A kernel's schedule as libtpu writes it down, `*-packed-bundles-post-ra.txt`, as a program.

A bundle is what a TensorCore issues in one cycle: up to two scalar instructions, and vector, matrix
and memory slots beside them. The scalar instructions decide everything that is counted here
(branches, DMAs, waits), so they are decoded; vector slots are only sorted by unit.

This dump is the final code but for one thing: the cycles in which the core waits for a result stand
in it as empty bundles, which the next pass folds into delays (`*-final_bundles.txt` lacks them: a
third to two thirds of the cycles of an attention kernel). Registers are physical ones.
"""

import collections
import dataclasses
import re
from pathlib import Path

_HEADER = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: *[> ]*\{", re.MULTILINE)
_INNERMOST_COMMENT = re.compile(r"/\*(?:(?!/\*|\*/).)*\*/", re.DOTALL)
_INNERMOST_BRACES = re.compile(r"\{[^{}]*\}")
_TARGET = re.compile(r"target bundleno = (\d+)")
_INSTRUCTION = re.compile(r"%(?P<result>\S+) = (?P<opcode>[\w.]+|\S+)(?P<rest>.*)", re.DOTALL)
_ATTRIBUTE = re.compile(r"\[(?:resolvable|thread|priority)[^\]]*\]")
_PREDICATE = re.compile(r"\((?P<negated>!?)%(?P<register>\w+)(?:, *(?P<otherwise>[^()]+))?\)\s*,?")
_TERM = re.compile(r"%(?P<register>\w+)|(?P<allocation>#\w+)|\$?(?P<number>0x[0-9a-f]+|-?\d+)")

# Pointers live far above 32-bit numbers: bit 60, then the object they point into, then the offset.
POINTER = 1 << 60
OBJECT_BITS = 44

# what a vector opcode keeps busy; the first match names the unit
_UNITS = {
    "matmul": re.compile(r"vmatmul"),
    "matrix load": re.compile(r"vmatp|vlgmr|vdwg"),
    "transcendental": re.compile(r"v(exp2|pow2|log2|rcp|rsqrt|tanh|erf)"),
    "pop": re.compile(r"vpop"),
    "load": re.compile(r"vld|cld"),
    "store": re.compile(r"vst(?!v)|cst"),
    "cross lane": re.compile(r"v(perm|rot|xpose|bcast)|v\w+\.xlane"),
    "alu": re.compile(r""),
}


@dataclasses.dataclass(frozen=True)
class Operand:
    """The sum of a number and of registers; an address is one of these too."""

    constant: int = 0
    registers: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One scalar slot. It acts when its predicate holds, else `result` becomes `otherwise`."""

    opcode: str
    result: str  # a physical register, or the name of a value in flight
    operands: tuple[Operand, ...]
    predicate: str | None = None
    negated: bool = False
    otherwise: Operand | None = None
    target: int | None = None  # the bundle a branch goes to
    note: str = ""  # the comments of the instruction


@dataclasses.dataclass
class Bundle:
    scalar: list[Instruction]
    units: collections.Counter[str]  # vector slots
    matmul_rows: int  # rows of the left operand that the matrix units are fed

    @property
    def is_empty(self) -> bool:
        return not self.scalar and not self.units


def read_program(path: Path) -> list[Bundle]:
    """Parse one `*-packed-bundles-post-ra.txt`."""
    text = path.read_text()
    headers = list(_HEADER.finditer(text))
    ends = [header.start() for header in headers[1:]] + [len(text)]
    allocations: dict[str, int] = {}
    program = []
    for header, end in zip(headers, ends, strict=True):
        bundle = Bundle([], collections.Counter(), 0)
        for slot in _inside_braces(text[header.end() : end]).split(";;"):
            _decode(slot.strip(), bundle, allocations)
        program.append(bundle)
    return program


def _inside_braces(text: str) -> str:
    """What stands before the brace that closes the bundle."""
    blank = text
    for nested in (_INNERMOST_COMMENT, _INNERMOST_BRACES):
        while (blanker := nested.sub(lambda m: " " * len(m[0]), blank)) != blank:
            blank = blanker
    return text[: blank.index("}")]


def _decode(slot: str, bundle: Bundle, allocations: dict[str, int]) -> None:
    """Add one slot to its bundle."""
    plain = slot
    while (shorter := _INNERMOST_COMMENT.sub("", plain)) != plain:
        plain = shorter
    match = _INSTRUCTION.match(plain.strip())
    if match is None:
        return  # an empty slot
    opcode = match["opcode"]
    if opcode[0] in "vc" and not opcode.startswith(("vsync", "compiler", "cfence")):
        unit = next(unit for unit, pattern in _UNITS.items() if pattern.match(opcode))
        bundle.units[unit] += 1
        if unit == "matmul":
            bundle.matmul_rows += _rows_of(opcode)
        return
    note = " ".join(_INNERMOST_COMMENT.findall(slot))
    instruction = _scalar(match, opcode, note, allocations)
    in_place = instruction.operands == (Operand(0, (instruction.result,)),)
    if not (opcode.startswith("int_to_ptr") and in_place):  # a change of type only
        bundle.scalar.append(instruction)


def _rows_of(opcode: str) -> int:
    """Rows that one matmul instruction reads: a register holds 8 of 32 bits, 16 of 16, 32 of 8."""
    if ".f32" in opcode:
        return 8
    return 16 if ".bf16" in opcode or ".f16" in opcode else 32


def _scalar(
    match: re.Match[str], opcode: str, note: str, allocations: dict[str, int]
) -> Instruction:
    rest = _ATTRIBUTE.sub("", match["rest"])
    predicate = _PREDICATE.search(rest)
    otherwise = None
    if predicate is not None:
        rest = rest[: predicate.start()] + rest[predicate.end() :]
        if predicate["otherwise"]:
            otherwise = _operand(predicate["otherwise"], allocations)
    target = None
    if opcode.startswith("sbr"):
        found = _TARGET.search(rest)
        target, rest = int(found[1]) if found else None, ""
    if opcode.startswith("inlined_call_operand"):
        index = re.search(r"index: (\d+)", rest)
        rest = index[1] if index else ""
    return Instruction(
        opcode=opcode,
        result=_physical(match["result"]),
        operands=tuple(_operand(part, allocations) for part in _parts(opcode, rest)),
        predicate=_physical(predicate["register"]) if predicate else None,
        negated=bool(predicate and predicate["negated"]),
        otherwise=otherwise,
        target=target,
        note=note,
    )


def _parts(opcode: str, rest: str) -> list[str]:
    if opcode == "sst":  # an address and, without a comma, what is stored there
        address, _, value = rest.rpartition("]")
        return [address, value]
    # a register may be followed by the name of what it was spilled to
    return [
        re.sub(r"^(\S+)\s+\[#.*", r"\1", part.strip()) for part in rest.split(",") if part.strip()
    ]


def _operand(text: str, allocations: dict[str, int]) -> Operand:
    constant, registers = 0, []
    for term in _TERM.finditer(re.sub(r"\b(smem|vmem|sflag|hbm|cmem):", "", text)):
        if term["register"]:
            registers.append(_physical(term["register"]))
        elif term["allocation"]:
            name = term["allocation"]
            # operands of the kernel take the objects below 4096
            constant += pointer(4096 + allocations.setdefault(name, len(allocations)))
        else:
            constant += int(term["number"], 0)
    return Operand(constant, tuple(registers))


def pointer(thing: int) -> int:
    """The address where object `thing` begins."""
    return POINTER + (thing << OBJECT_BITS)


def _physical(name: str) -> str:
    """`s19450_s24` is register s24; a value in flight keeps its number."""
    return name.rpartition("_")[2]
