"""Find the largest tiles that a chip has room for, by compiling for it.

    python tests/helpers/fit_tiles.py gfx1201 [--entry prefill/d128/b2] [--processes N]

For every entry of the chip's table, or those that are named: of CANDIDATES, from the largest on,
the first with which no kernel of the calls that take the entry has a fault. What a chip that is
there runs fastest is not found this way.
"""

import argparse
import itertools
import json
import os
from unittest import mock

import cross_compile

# BLOCK_M, BLOCK_N, num_warps, chain
CANDIDATES = sorted(
    (
        (m, n, warps, chain)
        for m, n, warps, chain in itertools.product(
            (16, 32, 64, 128), (16, 32, 64), (4, 8, 16), (0, 32, 64)
        )
        # a warp has 16 rows; rows that are cut in chains are few
        if m // 16 <= warps and (chain == 0 or m <= 32)
    ),
    key=lambda c: (-c[0] * c[1], -c[0], c[3] > 0, c[2]),
)

# a backward's kernels, which have tiles of their own
KINDS = ("dkdv", "dq", "dbias")


def entries_of(arch: str) -> tuple[dict[str, list[str]], list[str]]:
    """The calls that take each entry of a chip's table, and all its entries: with Hopper's own
    kernels, and as with a Triton that has no Gluon.
    """
    from triton.runtime.jit import JITFunction

    from torch_paged_attn.backends.triton.hopper import support
    from torch_paged_attn.backends.triton.portable.backward import plan as backward
    from torch_paged_attn.backends.triton.portable.forward import tiles
    from torch_paged_attn.backends.triton.runtime import launch_cache
    from torch_paged_attn.backends.triton.tuning import backward as backward_tuning
    from torch_paged_attn.backends.triton.tuning import portable as tuning

    taken: dict[str, list[str]] = {}
    # other chips have no kernels of their own that Gluon would be needed for
    gluon = (True, False) if arch == "sm90" else (True,)
    for name, make in cross_compile.CALLS.items():
        if (arch, name) in cross_compile.REFUSED:
            continue

        def choose(*sizes, name=name):
            entry, _ = tuning.find_entry(*sizes)
            taken.setdefault(entry, []).append(name)
            return tuning.choose_config(*sizes)

        def choose_backward(arch, *sizes, name=name):
            for kind in KINDS:
                if entry := backward_tuning.find_entry(arch, kind, *sizes):
                    taken.setdefault(entry, []).append(name)
            return backward_tuning.choose_backward_config(arch, *sizes)

        with (
            cross_compile.elsewhere(arch),
            mock.patch.object(tiles, "choose_config", choose),
            mock.patch.object(backward, "choose_backward_config", choose_backward),
            mock.patch.object(JITFunction, "run"),
        ):
            call = make()
            for has_gluon in gluon:
                tiles.choose_tiles.cache_clear()
                launch_cache.clear()
                with mock.patch.object(support, "HAS_GLUON", has_gluon):
                    call()
    return taken, list(tuning.table(arch))


def faults(arch: str, entry: str, tile: dict[str, int], name: str) -> list[str]:
    """What is wrong with the kernels of a call if an entry holds this tile."""
    from torch_paged_attn.backends.triton.portable.forward import tiles
    from torch_paged_attn.backends.triton.runtime import launch_cache
    from torch_paged_attn.backends.triton.tuning import backward as backward_tuning
    from torch_paged_attn.backends.triton.tuning import portable as tuning

    launch_cache.clear()
    with mock.patch.dict(tuning.table(arch), {entry: tile}):
        tuning.choose_config.cache_clear()
        backward_tuning.choose_backward_config.cache_clear()
        tiles.choose_tiles.cache_clear()
        kernels = cross_compile.compile_call(arch, name)
    if (kind := entry.split("/")[0]) in KINDS:
        kernels = [kernel for kernel in kernels if f"_{kind}_" in kernel.name]
    return [fault for kernel in kernels for fault in kernel.faults(arch, name)]


def fit(arch: str, entry: str, names: list[str]) -> tuple[str, dict[str, int] | None]:
    """The largest tile with which none of these calls has a fault."""
    kind, _, itemsize = entry.split("/")[:3]
    most = 32 if itemsize == "b4" else 64 if kind == "decode" else 128
    hardest = list(names)
    for m, n, warps, chain in CANDIDATES:
        if m > most or (chain and kind in KINDS):
            continue
        if kind == "dkdv":  # its rows are keys
            m, n = n, m
        tile = {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": 1}
        tile |= {"chain": chain} if chain else {}
        for name in hardest:
            if found := faults(arch, entry, tile, name):
                print(f"# {entry} {tile} {name}: {'; '.join(found)}", flush=True)
                # what failed once will fail again: first
                hardest.remove(name)
                hardest.insert(0, name)
                break
        else:
            return entry, tile
    return entry, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arch", choices=cross_compile.CHIPS)
    parser.add_argument("--entry", action="append", help="of the table; all without one")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    with cross_compile.workers(options.processes) as pool:
        taken, entries = pool.submit(entries_of, options.arch).result()
        wanted = options.entry or entries
        fitted = [pool.submit(fit, options.arch, entry, taken[entry]) for entry in wanted]
        for future in fitted:
            entry, tile = future.result()
            print(f'  "{entry}": {json.dumps(tile)}', flush=True)


if __name__ == "__main__":
    main()
