"""`nki.isa`: one function for each instruction, with the documented signature."""

from nki_emulator.enums import DgeMode as dge_mode
from nki_emulator.enums import Engine as engine
from nki_emulator.enums import MatmulPerfMode as matmul_perf_mode
from nki_emulator.enums import NcVersion as nc_version
from nki_emulator.enums import OobMode as oob_mode
from nki_emulator.enums import ReduceCommand as reduce_cmd
from nki_emulator.isa.dma import dma_copy, dma_transpose
from nki_emulator.isa.moves import (
    iota,
    memset,
    tensor_copy,
    tensor_copy_predicated,
)
from nki_emulator.isa.scalar_engine import activation
from nki_emulator.isa.sequencer import (
    get_nc_version,
    register_alloc,
    register_load,
    register_move,
    register_store,
)
from nki_emulator.isa.tensor_engine import nc_matmul, nc_transpose
from nki_emulator.isa.vector_engine import (
    exponential,
    range_select,
    reciprocal,
    scalar_tensor_tensor,
    tensor_reduce,
    tensor_scalar,
    tensor_tensor,
)

__all__ = [
    "activation",
    "dge_mode",
    "dma_copy",
    "dma_transpose",
    "engine",
    "exponential",
    "get_nc_version",
    "iota",
    "matmul_perf_mode",
    "memset",
    "nc_matmul",
    "nc_transpose",
    "nc_version",
    "oob_mode",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_tensor_tensor",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_tensor",
]
