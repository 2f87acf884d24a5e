"""Tiles of the backward's kernels: explicit choice, then the chip's table, then a rule of thumb."""

import dataclasses

from torch_paged_attn.backends.triton.tuning.portable import WIDTHS, Config, table


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Tiles of the kernel of dK and dV, of that of dQ, and of a shared bias's gradient: in each,
    BLOCK_M queries and BLOCK_N keys.
    """

    dkdv: Config
    dq: Config
    dbias: Config


def entries(kind: str, head_dim: int, itemsize: int, is_plain: bool, is_full: bool) -> list[str]:
    """The entries of a table that fit a kernel, the most special first: `"dkdv/d128/b2"`, with
    `/full` where no window hides a key, and `/extra` for a call that is not plain (a bias, ALiBi,
    softcap, dropout or a layout).
    """
    width = next((w for w in WIDTHS if head_dim <= w), WIDTHS[-1])
    key = f"{kind}/d{width}/b{itemsize}"
    if not is_plain:
        return [f"{key}/extra", key]
    return [f"{key}/full", key] if is_full else [key]


def choose_backward_config(
    arch: str, head_dim: int, itemsize: int, is_plain: bool, is_full: bool
) -> BackwardConfig:
    """`head_dim` is the larger of the two, `itemsize` that of a factor in the products."""
    found = {}
    for kind in ("dkdv", "dq", "dbias"):
        names = entries(kind, head_dim, itemsize, is_plain, is_full)
        entry = next((table(arch)[e] for e in names if e in table(arch)), None)
        rule = _rule_of_thumb(arch, kind, head_dim, itemsize)
        found[kind] = rule if entry is None else Config(**entry)
    return BackwardConfig(**found)


def _rule_of_thumb(arch: str, kind: str, head_dim: int, itemsize: int) -> Config:
    """Small tiles, for a chip that nobody has looked at."""
    if arch == "interpreter":  # fewer and larger NumPy calls are faster
        return Config(64, 64, 4, 1)
    if itemsize == 4 or head_dim > 256:
        return Config(16, 16, 8, 1)
    if head_dim > 128:
        return Config(32, 32, 8, 1)
    return Config(32, 64, 8, 1) if kind == "dkdv" else Config(64, 32, 8, 1)
