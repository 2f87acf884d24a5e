"""For which page sizes kernels are compiled.

A cache without pages is passed as one page for each sequence, whose size is the cache's length. If
kernels were compiled for it, each step of a cache that grows would compile one. So a kernel is
compiled for the usual page sizes alone, takes others when it runs, and does not need the size of
pages that are all of a sequence.
"""

from torch_paged_attn.attention_call import AttentionCall

# the page sizes that are compiled in
COMPILED = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def has_rows(call: AttentionCall) -> bool:
    """Whether each sequence has all of its keys in one page, whatever the page's size."""
    return call.block_table is not None and call.block_table.shape[1] == 1


def compiled_size(call: AttentionCall) -> int:
    """The page size for which a call's kernel is compiled; 0 if there are no pages, if the size
    does not matter (`has_rows`), and if the kernel takes it when it runs (`size_at_run_time`).
    """
    return call.page_size if call.page_size in COMPILED and not has_rows(call) else 0


def size_at_run_time(call: AttentionCall) -> int | None:
    """The page size that a call's kernel takes when it runs; None if it takes none."""
    if call.page_size == 0 or call.page_size in COMPILED or has_rows(call):
        return None
    return call.page_size
