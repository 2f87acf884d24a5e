"""The CPU backend: C++ kernels on the libtorch stable ABI, registered by loading their library."""

import functools
import os
import platform
import struct
from typing import Any

import torch

from torch_paged_attn import environment
from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.ops import _library, paths
from torch_paged_attn.ops.backend import Backend
from torch_paged_attn.ops.lacking import COLUMN_SCALES, INT4, TOKEN_SCALES

X86 = ("x86_64", "amd64")


class Cpu(Backend):
    """Loads the library of kernels."""

    name = "cpu"
    dispatch_keys = ("CPU",)
    is_compiled = True
    supports = (
        *("q_latent", "tail_mask", "k_start", "q_position", "rng_state[2:]", "batch_invariant"),
        *("key_ranks", "key_rank", "key_interleave", *TOKEN_SCALES, *COLUMN_SCALES, *INT4),
    )
    supports_in_backward = (
        *("tail_mask", "k_start", "q_position", "rng_state[2:]"),
        *("key_ranks but of blocksparse", "key_rank", "key_interleave"),
    )
    lacks_ops = ()

    def unsupported(self) -> str | None:
        """None when the kernels are loaded, else the reason why not."""
        return _load()

    def untested(self, target: str | None = None) -> str | None:
        """None on x86-64. The kernels for aarch64 have run in an emulator only."""
        return None if platform.machine().lower() in X86 else super().untested()

    def path(self, op: str, call: Any, target: str | None = None) -> paths.Path:
        """Instruction set, products, and which of two engines the tasks of attention go to."""
        from torch_paged_attn.backends.cpu import path

        if (reason := self.unsupported()) is not None:
            return paths.Path(self.name, None, reason)
        if op in _library.NOT_COMPILED:
            return paths.Path(self.name, None, f"the {self.name} backend does not have it yet")
        return path.path(op, call)

    def unsupported_backward(self, call: AttentionCall) -> None:
        """None: every call that has gradients has them here."""

    def notes(self) -> list[str]:
        """Why each faster instruction set is not used: not built, absent, refused by the system."""
        if self.unsupported() is not None:
            return []
        return [f"without {line}" for line in torch.ops.paged_attn.cpu_isas_missing().splitlines()]


@functools.cache
def _load() -> str | None:
    if not environment.LIBRARY.exists():
        if asked := os.environ.get("PAGED_ATTN_LIBRARY"):
            return f"PAGED_ATTN_LIBRARY names {asked}, which does not exist"
        return (
            "there are no CPU kernels: the package was installed with PAGED_ATTN_BUILD_CPP=0;"
            " install it again without that (`pip install .` in its source folder)"
        )
    try:
        torch.ops.load_library(str(environment.LIBRARY))
    except OSError as error:
        return f"the CPU kernels do not load: {error.__cause__ or error}"
    _library.LIBRARY.impl("cpu_announce", _announce, "CompositeExplicitAutograd")
    _skip_unsupported()
    return None


def _skip_unsupported() -> None:
    """Say to the kernels which arguments of their schemas they do not read."""
    for op in paths.CALLS:
        names = BACKEND.lacks_in_backward if op.endswith("_backward") else BACKEND.lacks
        schema = getattr(torch.ops.paged_attn, op).default._schema
        for place, argument in enumerate(schema.arguments):
            if argument.name in names:
                torch.ops.paged_attn.cpu_skip(op, place, _bits(argument.default_value))


def _bits(default: float | bool | None) -> int:
    """How C++ gets a default: None is a null pointer."""
    if isinstance(default, float):
        return int.from_bytes(struct.pack("<d", default), "little", signed=True)
    return int(default or 0)


def _announce(op: str, has_pairs: bool) -> None:
    """Log which kernel answers. C++ calls it before the first call that takes a kernel."""
    from torch_paged_attn.backends.cpu.path import kernel_name

    paths.announce_experimental("cpu", BACKEND.untested())
    paths.announce(op, "cpu", kernel_name(op, has_pairs))


BACKEND = Cpu()
