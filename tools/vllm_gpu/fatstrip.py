"""Zero the code of GPUs other than sm_90 in a library's fatbins, so that xz makes it small.

    python fatstrip.py LIBRARY RESULT

Headers and sizes stay. A container without code for sm_90 keeps its newest code below it, or its
PTX.
"""

import re
import struct
import subprocess
import sys
from pathlib import Path

MAGIC, PTX, ELF, TARGET = 0xBA55ED50, 1, 2, 90


def main(source: str, result: str) -> None:
    data = bytearray(Path(source).read_bytes())
    sections = subprocess.run(["readelf", "-SW", source], capture_output=True, text=True).stdout
    kept = zeroed = 0
    for found in re.finditer(
        r"\]\s+(\.nv_fatbin|__nv_relfatbin)\s+\S+\s+([0-9a-f]+)\s+([0-9a-f]+)\s+([0-9a-f]+)",
        sections,
    ):
        at, size = int(found[3], 16), int(found[4], 16)
        end = at + size
        while at < end - 16:
            magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
            if magic != MAGIC:
                at += 8
                continue
            entry, at = at + header, at + header + length
            entries = []
            while entry < at:
                kind, _, header, length = struct.unpack_from("<HHIQ", data, entry)
                if header == 0:
                    break
                arch = struct.unpack_from("<I", data, entry + 28)[0]
                entries.append((kind, arch, entry + header, length))
                entry += header + length
            best = max(
                (arch for kind, arch, *_ in entries if kind == ELF and arch <= TARGET), default=None
            )
            for kind, arch, start, length in entries:
                if (kind == ELF and arch == best) or (kind == PTX and best is None):
                    kept += length
                else:
                    data[start : start + length] = bytes(length)
                    zeroed += length
    Path(result).write_bytes(data)
    print(f"{source}: {kept} bytes of code kept, {zeroed} zeroed")


if __name__ == "__main__":
    main(*sys.argv[1:])
