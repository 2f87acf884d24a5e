"""Registers of the sequencer, and what a kernel may ask of the chip."""

import numpy as np

from nki_emulator.dtypes import INTEGERS
from nki_emulator.enums import NcVersion
from nki_emulator.machine import machine, require
from nki_emulator.memory import PSUM
from nki_emulator.registers import VirtualRegister
from nki_emulator.tensor import NkiTensor


def get_nc_version() -> NcVersion:
    """The generation that the kernel is compiled for."""
    return NcVersion(machine().generation)


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A register, with a value if one is given."""
    return VirtualRegister(x)


def register_move(dst: VirtualRegister, src: VirtualRegister | int) -> None:
    """`dst = src`."""
    require(not dst.read_only, "a loop's variable is read-only")
    dst.value = src.known() if isinstance(src, VirtualRegister) else src


def register_load(dst: VirtualRegister, src: NkiTensor) -> None:
    """The one element of `src`."""
    require(not dst.read_only, "a loop's variable is read-only")
    require(src.size == 1, f"register_load of {src.shape}; allowed: one element")
    require(src.buffer is not PSUM, "register_load does not reach PSUM")
    require(
        src.dtype in INTEGERS,
        f"register_load of {src.dtype}: its value or bits, no page says which",
    )
    dst.value = int(src.read().item())


def register_store(dst: NkiTensor, src: VirtualRegister) -> None:
    """Into the one element of `dst`."""
    require(dst.size == 1, f"register_store to {dst.shape}; allowed: one element")
    require(dst.buffer is not PSUM, "register_store does not reach PSUM")
    dst.write(np.full(dst.shape, src.known()))
