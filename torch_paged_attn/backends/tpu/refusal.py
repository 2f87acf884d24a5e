"""The error for a valid call that this backend has no kernel for."""

from typing import NoReturn

from torch_paged_attn.ops import checks


def refuse(op: str, reason: str) -> NoReturn:
    """Raise for a call that `unsupported` has a reason against."""
    checks.refuse(op, f"not supported by the tpu backend: {reason}")
