"""The error for a valid call that this backend has no kernel for."""

from typing import NoReturn


def refuse(op: str, reason: str) -> NoReturn:
    """Raise for a call that `unsupported` has a reason against."""
    raise NotImplementedError(f"paged_attn::{op}: TPU: {reason}")
