"""Which NKI the kernels are written in: the `nki` package, or the emulator where the user asks.

`PAGED_ATTN_NEURON_EMULATE=1` runs the kernels on NumPy
(`testing/nki_emulator`), for trying things without a chip.
"""

from torch_paged_attn import environment

if environment.NEURON_EMULATE:
    from torch_paged_attn.testing.nki_emulator import nisa, nl
else:
    try:
        import nki.isa as nisa  # type: ignore[no-redef]
        import nki.language as nl  # type: ignore[no-redef]
    except ImportError:
        nisa = nl = None  # type: ignore[assignment]
