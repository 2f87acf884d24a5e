"""Faults in what is loaded and stored: gathers, scatters, 8-bit numbers, cache writes."""

from faults.fault import BYTES, MIXED, SHARED, Fault, suite

DEQUANT, GATHER, LOAD = "kernels/dequant.py", "kernels/gather_scatter.py", "kernels/load_item.py"
HIDDEN = "tests/neuron/test_bias.py", "-k", "hides_from_all"
WRITES = suite("test_write and not bfloat16")

FAULTS = (
    Fault(
        "448 is NaN",
        DEQUANT,
        "op0=nl.equal, operand0=NAN_BITS",
        "op0=nl.greater_equal, operand0=NAN_BITS - 128.0",
        BYTES,
    ),
    Fault("NaN is a number", DEQUANT, "operand0=14)", "operand0=13)", BYTES),
    Fault("e4m3fn without signs", DEQUANT, "operand0=0x80", "operand0=0x00", BYTES),
    Fault("e4m3fn without its top bit", DEQUANT, "operand0=0x7F, op1", "operand0=0x3F, op1", BYTES),
    Fault("e4m3fn halved", DEQUANT, "operand0=256.0", "operand0=128.0", BYTES),
    Fault(
        "e4m3 of generation 3 taken for e4m3fn",
        DEQUANT,
        "nc_version.gen4",
        "nc_version.gen3",
        BYTES,
    ),
    Fault(
        "keys leave a bad row out",
        LOAD,
        "heads, run, nisa.oob_mode.error",
        "heads, run, nisa.oob_mode.skip",
        BYTES,
    ),
    Fault(
        "gather takes heads by tokens",
        GATHER,
        "[layout.head_stride, heads]",
        "[layout.token_stride, heads]",
        MIXED,
    ),
    Fault(
        "gathers and scatters without their offset",
        GATHER,
        "offset=offset, vector_offset=index",
        "offset=0, vector_offset=index",
        ("tests/neuron/test_attention.py", "-k", "two_programs"),
    ),
    Fault(
        "scatter refuses what it has to skip",
        GATHER,
        "dst=scattered, src=tile, oob_mode=skip",
        "dst=scattered, src=tile, oob_mode=nisa.oob_mode.error",
        MIXED,
    ),
    Fault(
        "queries refuse what they have to skip",
        LOAD,
        "part, 1, 1, nisa.oob_mode.skip)\n        if",
        "part, 1, 1, nisa.oob_mode.error)\n        if",
        MIXED,
    ),
    Fault(
        "key range one late",
        LOAD,
        "program.key_of_partition, bound, columns.key_start,",
        "program.key_of_partition, bound, columns.key_stop,",
        MIXED,
    ),
    Fault(
        "shared keys are cleared as unshared ones are",
        LOAD,
        "outside(unseen_k, program.key_of_share, bound, columns.key_start",
        "outside(unseen_k, program.key_of_share, bound, columns.key_stop",
        SHARED,
    ),
    Fault("bias shows absent keys", LOAD, "op=nl.logical_or)", "op=nl.logical_and)", HIDDEN),
    Fault(
        "the first of two tokens for a slot wins",
        "reshape_and_cache.py",
        "F.pad(ordered[1:] != ordered[:-1], (0, 1), value=True)",
        "F.pad(ordered[1:] != ordered[:-1], (1, 0), value=True)",
        WRITES,
    ),
    Fault(
        "8-bit writes wrap round",
        "reshape_and_cache.py",
        "real.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)",
        "real",
        WRITES,
    ),
    Fault(
        "int8 writes are cut off",
        "reshape_and_cache.py",
        "real.round().clamp",
        "real.trunc().clamp",
        WRITES,
    ),
)
