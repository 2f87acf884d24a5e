"""Tiles of the backward's kernels: explicit choice, then the chip's table, then a rule of thumb."""

import dataclasses
import functools

from torch_paged_attn.backends.triton.tuning.portable import WIDTHS, Config, table


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Tiles of the kernel of dK and dV, of that of dQ, and of that of a bias that heads share: in
    each, BLOCK_M queries and BLOCK_N keys.
    """

    dkdv: Config
    dq: Config
    dbias: Config


def find_entry(
    arch: str, kind: str, head_dim: int, itemsize: int, is_plain: bool, is_full: bool
) -> str | None:
    """The entry of a chip's table for a kernel, the most special that there is: `"dkdv/d128/b2"`
    (also `dq` and `dbias`), with `/full` where no window hides a key, and `/extra` for a call that
    is not plain: with a bias, ALiBi, softcap, dropout or a layout.
    """
    width = next((w for w in WIDTHS if head_dim <= w), WIDTHS[-1])
    key = f"{kind}/d{width}/b{itemsize}"
    special = ("/full" if is_full else "") if is_plain else "/extra"
    return next((entry for entry in (key + special, key) if entry in table(arch)), None)


@functools.lru_cache(maxsize=4096)
def choose_backward_config(
    arch: str, head_dim: int, itemsize: int, is_plain: bool, is_full: bool
) -> BackwardConfig:
    """`head_dim` is the larger of the two, `itemsize` that of a factor in the products."""

    def choose(kind: str) -> Config:
        entry = find_entry(arch, kind, head_dim, itemsize, is_plain, is_full)
        if entry is None:
            return _rule_of_thumb(arch, kind, head_dim, itemsize)
        return Config(**table(arch)[entry])

    return BackwardConfig(choose("dkdv"), choose("dq"), choose("dbias"))


def _rule_of_thumb(arch: str, kind: str, head_dim: int, itemsize: int) -> Config:
    """Small tiles, for a chip that nobody has looked at."""
    if arch == "interpreter":  # fewer and larger NumPy calls are faster
        return Config(64, 64, 4, 1)
    if itemsize == 4 or head_dim > 128:
        return Config(16, 16, 8, 1)
    return Config(16, 32, 8, 1) if kind == "dkdv" else Config(32, 16, 8, 1)
