"""A NumPy emulator of the part of AWS's Neuron Kernel Interface that the Neuron backend uses.

Written from the public documentation of NKI 0.6 alone. It runs a kernel's own source, one
instruction after the other, and refuses what the hardware or the documentation does not allow:
limits of partitions, banks and memories by generation, operand types, reads of memory that nothing
wrote, DMAs out of bounds. It says nothing about speed, nor about what the compiler accepts.

    with emulated(generation=3) as machine:
        out = simulate(kernel)(array, other, 64)
    machine.peak, machine.instructions, machine.transfers
"""

from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator.machine import Machine, Violation, emulated
from nki_emulator.simulate import simulate

__all__ = ["Machine", "Violation", "emulated", "nisa", "nl", "simulate"]
