"""The enumerations of `nki.isa`."""

import enum


class Engine(enum.Enum):
    """Who executes an instruction."""

    unknown = 0
    tensor = 1
    vector = 2
    scalar = 3
    gpsimd = 4
    dma = 5
    sync = 6


class DgeMode(enum.Enum):
    """Who makes the descriptors of a DMA: software, hardware, or the host beforehand."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class OobMode(enum.Enum):
    """What a DMA does with an index that is out of bounds."""

    error = 0
    skip = 1


class ReduceCommand(enum.Enum):
    """What an activation does with the accumulation registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class MatmulPerfMode(enum.Enum):
    """Speed modes of the tensor engine."""

    none = 0
    double_row = 1


class NcVersion(enum.IntEnum):
    """Generations of NeuronCore."""

    gen2 = 2
    gen3 = 3
    gen4 = 4
