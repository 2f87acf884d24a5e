"""Whether what tensors hold is checked: that reads them on the host."""

import os


def values_are_checked() -> bool:
    """Off unless PAGED_ATTN_CHECK=1."""
    return os.environ.get("PAGED_ATTN_CHECK", "0") == "1"
