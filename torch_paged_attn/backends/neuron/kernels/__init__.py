"""The code that runs on the chip: NKI's language, which `nki_emulator.lint` holds every file to.

Both of NKI's front ends must take it, the parser (before 0.7) and the tracer (from 0.7 on): no
`is`, no operators on tiles, and loops are `range` (unrolled) or `nl.fori_loop`.
"""
