"""How the TPU backend says what it does not do."""

from typing import NoReturn


def refuse(op: str, reason: str) -> NoReturn:
    """Raise for what the contract allows and this backend does not do yet."""
    raise NotImplementedError(f"paged_attn::{op}: TPU: {reason}")
