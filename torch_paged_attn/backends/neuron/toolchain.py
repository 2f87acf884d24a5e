"""Which NKI the kernels are written in: the `nki` package, or the emulator where the user asks.

`PAGED_ATTN_NEURON_EMULATE=1`, read when this module is imported, runs the kernels on NumPy
(`testing/nki_emulator`), for trying things without a chip.
"""

import os

EMULATED = os.environ.get("PAGED_ATTN_NEURON_EMULATE", "0") == "1"

if EMULATED:
    from torch_paged_attn.testing.nki_emulator import nisa, nl
else:
    try:
        import nki.isa as nisa  # type: ignore[no-redef]
        import nki.language as nl  # type: ignore[no-redef]
    except ImportError:
        nisa = nl = None  # type: ignore[assignment]
