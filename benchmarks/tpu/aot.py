"""Compile JAX functions for TPUs that are not there, and keep the schedules of their kernels.

libtpu reads its environment when it is loaded, so import this module before anything compiles.
"""

import contextlib
import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_DUMPS = tempfile.TemporaryDirectory(prefix="tpu-schedules-")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    # else two processes that compile at once fight over libtpu's lock file, and one dies
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={_DUMPS.name} --xla_jf_dump_llo_text=true"
    " --xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra|bundles-pre-codegen",
}

import jax  # noqa: E402
import numpy as np  # noqa: E402
from bundles import read_program  # noqa: E402
from emulator import Counts, run  # noqa: E402
from generations import Generation  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding  # noqa: E402
from operations import Operations, read_operations  # noqa: E402

# an argument whose values no schedule depends on needs no values
Argument = jax.Array | np.ndarray | jax.ShapeDtypeStruct
Operands = list[np.ndarray | None]

_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
_VMEM = re.compile(
    r'used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)'
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Pallas kernel of a compiled function."""

    name: str
    schedule: Path
    vmem_bytes: int
    operands: dict[int, np.ndarray]  # tables, flat, in the order in which they lie in memory

    def counts(self, generation: Generation) -> Counts:
        return run(read_program(self.schedule), generation, self.operands)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function: its Pallas kernels, and what XLA does around them."""

    kernels: list[Kernel]
    operations: Operations  # kernels among them
    temporary_bytes: int


def compile_kernels(
    function: Callable[..., Any], arguments: Sequence[Any], generation: Generation
) -> list[Kernel]:
    """The Pallas kernels of `compile_program`."""
    return compile_program(function, arguments, generation).kernels


def compile_program(
    function: Callable[..., Any], arguments: Sequence[Any], generation: Generation
) -> Program:
    """Compile `function` with libtpu. What does not fit raises.

    `arguments` may be nested and hold None; tables must have values if kernels are to be counted.
    A `function` that is under `jax.jit` keeps what it donates.
    """
    traced, compiled, dumped = compile_and_dump(function, arguments, generation)
    hlo, analysis = dumped_module(dumped)
    calls = kernel_operands(traced.jaxpr, jax.tree.leaves(arguments))
    return Program(
        [_kernel(name, operands, hlo, analysis, dumped) for name, operands in calls],
        read_operations(hlo, analysis),
        compiled.memory_analysis().temp_size_in_bytes,
    )


def compile_and_dump(
    function: Callable[..., Any], arguments: Sequence[Any], generation: Generation
) -> tuple[Any, Any, list[Path]]:
    """The traced function, the compiled one, and what libtpu has written of it."""
    before = set(os.listdir(_DUMPS.name))
    with target(generation) as device:
        sharding = SingleDeviceSharding(device)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
        )
        traced = (function if hasattr(function, "trace") else jax.jit(function)).trace(*shapes)
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    new = set(os.listdir(_DUMPS.name)) - before
    return traced, compiled, [Path(_DUMPS.name, name) for name in new]


def dumped_module(dumped: list[Path]) -> tuple[str, str]:
    """The optimised module, and the analysis of its schedule."""
    endings = "TLP-hlo.txt", "schedule-analysis_bundles-pre-codegen.txt"
    hlo, analysis = (_only(dumped, ending).read_text() for ending in endings)
    return hlo, analysis


@contextlib.contextmanager
def target(generation: Generation) -> Iterator[Any]:
    """The device to compile for; Pallas' questions about the chip are answered for it."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=generation.topology)
    device = topology.devices[0]
    abstract = AbstractDevice(
        platform="tpu", device_kind=device.device_kind, num_cores=device.num_cores
    )
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        yield device


def device_kind(generation: Generation) -> str:
    """What JAX calls this generation's devices."""
    with target(generation) as device:
        return device.device_kind


def _only(dumped: list[Path], ending: str) -> Path:
    [found] = (path for path in dumped if path.name.endswith(ending))
    return found


def _kernel(
    name: str | None, operands: Operands, hlo: str, analysis: str, dumped: list[Path]
) -> Kernel:
    # a kernel that its author did not name is called by XLA as it likes
    stem = re.escape(name) if name else r"[\w\-]+"
    call = re.search(
        rf"%(?P<name>{stem}(?:\.\d+)?) = [^\n]*custom-call\((?P<operands>[^)]*)\),"
        r' custom_call_target="tpu_custom_call"[^\n]*',
        hlo,
    )
    if call is None:
        raise LookupError(f"no kernel {name} in the compiled module")
    pattern = re.compile(rf"\d+-{re.escape(call['name'])}-\d+-packed-bundles-post-ra\.txt")
    schedule = next(path for path in dumped if pattern.fullmatch(path.name))
    used = next(line for line in analysis.splitlines() if f"%{call['name']} = " in line)
    vmem = _VMEM.search(used)
    names = re.findall(r"%([\w.\-]+)", call["operands"])
    tables = {
        index: _as_stored(operand, names[index], hlo)
        for index, operand in enumerate(operands)
        if operand is not None
    }
    return Kernel(call["name"], schedule, int(vmem[1]) if vmem else 0, tables)


def _as_stored(table: np.ndarray, name: str, hlo: str) -> np.ndarray:
    """A table's bytes in memory, where two dimensions or more are stored in tiles."""
    if table.ndim < 2:
        return table.reshape(-1)
    layout = re.search(rf"%{re.escape(name)} = \w+\[[\d,]*\]\{{[\d,]*:T\((\d+),(\d+)\)", hlo)
    if layout is None:
        raise LookupError(f"the layout of {name} is not in the compiled module")
    rows, lanes = int(layout[1]), int(layout[2])
    planes = table.reshape(-1, *table.shape[-2:])
    _, height, width = planes.shape
    planes = np.pad(planes, ((0, 0), (0, -height % rows), (0, -width % lanes)))
    tiles = planes.reshape(len(planes), planes.shape[1] // rows, rows, -1, lanes)
    return tiles.swapaxes(2, 3).reshape(-1)


def kernel_operands(closed: Any, arguments: Sequence[Any]) -> list[tuple[str | None, Operands]]:
    """Name and operands of each Pallas call of a jaxpr, in order.

    What XLA computes before a kernel is computed here too, as far as it hangs on arguments with
    values; the other operands are None.
    """
    values = [None if isinstance(x, jax.ShapeDtypeStruct) else x for x in arguments]
    found: list[tuple[str | None, Operands]] = []
    _evaluate(closed, values, found)
    return found


def _evaluate(
    closed: Any, values: list[Any], found: list[tuple[str | None, Operands]]
) -> list[Any]:
    """Run a jaxpr on values of which some are None, and note the Pallas calls on the way."""
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known |= dict(zip(jaxpr.invars, values, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else known[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        outputs: list[Any] = [None] * len(equation.outvars)
        primitive, params = equation.primitive, equation.params
        if primitive.name == "pallas_call":
            arrays = [None if x is None else np.asarray(x) for x in inputs]
            found.append((params["name"], arrays))
        elif primitive.name in _CALLS:
            inner = params.get("jaxpr") or params["call_jaxpr"]
            outputs = _evaluate(inner, inputs, found)
        elif all(x is not None for x in inputs):
            with equation.ctx.manager:
                result = primitive.bind(*inputs, **primitive.get_bind_params(params))
            outputs = list(result) if primitive.multiple_results else [result]
        known |= dict(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
