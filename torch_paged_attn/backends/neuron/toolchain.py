"""NKI as the kernels see it: `nl` and `nisa`, and which package they come from.

The package is `nki`, or, where `PAGED_ATTN_NEURON_EMULATE=1` asks for it, `nki_emulator`: the same
modules on NumPy. The emulator is no part of this package; the repository has it under `tools/`.
"""

import importlib
import types
from typing import TYPE_CHECKING, Any

from torch_paged_attn import environment

PACKAGE = "nki_emulator" if environment.NEURON_EMULATE else "nki"


def import_or_none(name: str) -> Any:
    """The module, or None: what PyPI has under Neuron's names raises ImportError."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


if TYPE_CHECKING:
    import nki.isa as nisa
    import nki.language as nl
else:
    # without NKI the kernels' modules still import, so that the backend can say what is missing
    nl = import_or_none(f"{PACKAGE}.language") or types.SimpleNamespace(NKIObject=object)
    nisa = import_or_none(f"{PACKAGE}.isa")
