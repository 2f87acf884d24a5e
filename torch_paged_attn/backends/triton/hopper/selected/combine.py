"""Results of tokens whose lists several programs shared, and the sinks of these tokens.

A program looks at a token. If there are more tokens than groups of programs, it looks at one of the
boundaries of the groups' shares, and at the token within which that lies, if it is the first
boundary there.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.hopper.mla.combine import TokenParts, _group_of, add_parts
from torch_paged_attn.backends.triton.hopper.selected.arguments import ListSizes
from torch_paged_attn.backends.triton.runtime.launch import gdc_wait


@triton.jit(do_not_specialize=(*ListSizes._fields, "num_heads", "programs"))
def _hopper_selected_combine_kernel(
    out_ptr, pointers,
    total_q, batch, entries, num_rows, max_pages, stride_index_token, stride_count_token,
    stride_table, units, unit_pairs,
    num_heads, programs,
    OPTIONS: tl.constexpr, SHARES: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """See `_hopper_mla_combine_kernel`. The first kernel has `programs` programs."""
    groups = (programs // OPTIONS.HEAD_TILES).to(tl.int64)
    total = tl.cast(total_q, tl.int64) * units
    number = tl.program_id(0).to(tl.int64)
    is_by_token = total_q < groups
    token = tl.where(is_by_token, number, total * (number + 1) // groups // units)
    first = _group_of(token * units, groups, total)
    parts = _group_of(token * units + units - 1, groups, total) - first + 1
    is_own = is_by_token | (first == number)
    gdc_wait(IS_DEPENDENT)
    if is_own & (parts > 1):
        has_sinks = token < tl.load(pointers.cu_seqlens_q + batch)
        add_parts(
            TokenParts(token, 0, first, parts), out_ptr, pointers, pointers.sinks, has_sinks,
            total_q, num_heads, programs, OPTIONS, SHARES,
        )  # fmt: skip
