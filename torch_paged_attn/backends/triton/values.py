"""Whether tensors are read on the host to check what they hold: a debugging aid that waits."""

import os


def values_are_checked() -> bool:
    """`PAGED_ATTN_CHECK=1` turns it on."""
    return os.environ.get("PAGED_ATTN_CHECK", "0") == "1"
