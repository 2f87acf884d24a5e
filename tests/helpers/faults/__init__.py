"""The faults that `mutants.py` seeds, by what they break."""

from faults import attention, backward, memory, work_lists
from faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *memory.FAULTS,
    *attention.FAULTS,
    *backward.FAULTS,
    *work_lists.FAULTS,
)
