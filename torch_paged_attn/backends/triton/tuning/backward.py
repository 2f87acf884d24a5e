"""Tile sizes of the backward's kernels: from the GPU's table, else by a rule of thumb."""

import dataclasses
import functools

from torch_paged_attn.backends.triton.tuning.portable import WIDTHS, Config, table


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Tiles of BLOCK_M queries and BLOCK_N keys: of the kernel of dK and dV, of that of dQ, and of
    that of dbias for a bias with one head.
    """

    dkdv: Config
    dq: Config
    dbias: Config


def find_entry(arch: str, kind: str, head_dim: int, itemsize: int, special: str) -> str | None:
    """The key of the most specific entry in a GPU's table, such as `"dkdv/d128/b2"`; None if there
    is none. The kind is `dkdv`, `dq` or `dbias`; `d` is one of WIDTHS; `b` is itemsize. What is
    special about a call follows: see `choose_backward_config`.
    """
    width = next((w for w in WIDTHS if head_dim <= w), WIDTHS[-1])
    key = f"{kind}/d{width}/b{itemsize}"
    others = ("/extra",) if special == "/mask" else ()
    names = (special, *others, "")
    return next((key + name for name in names if key + name in table(arch)), None)


@functools.lru_cache(maxsize=4096)
def choose_backward_config(arch: str, head_dim: int, itemsize: int, special: str) -> BackwardConfig:
    """The tiles of a call. `head_dim`: the larger of head_dim and head_dim_v; `itemsize`: bytes of
    an element in matrix products; `special`: `/full` without causal mask and window, `/mask` with a
    bool mask, which takes few registers, and nothing of what `/extra` is: a bias, ALiBi, softcap,
    dropout, a layout.
    """

    def choose(kind: str) -> Config:
        entry = find_entry(arch, kind, head_dim, itemsize, special)
        if entry is None:
            return _rule_of_thumb(arch, kind, head_dim, itemsize)
        return Config(**table(arch)[entry])

    return BackwardConfig(choose("dkdv"), choose("dq"), choose("dbias"))


def _rule_of_thumb(arch: str, kind: str, head_dim: int, itemsize: int) -> Config:
    """Small tiles, for a GPU without a table."""
    if arch == "interpreter":  # fewer and larger NumPy calls are faster
        return Config(64, 64, 4, 1)
    if itemsize == 4 or head_dim > 128:
        return Config(16, 16, 8, 1)
    return Config(16, 32, 8, 1) if kind == "dkdv" else Config(32, 16, 8, 1)
