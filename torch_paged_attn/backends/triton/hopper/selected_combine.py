"""Results of tokens whose lists several programs shared, and the sinks of these tokens.

Tokens' units of work are dealt out to groups of programs one after the other. So a token that
several groups share has a boundary of shares within its units, and there is one less of these
boundaries than groups: a program looks at one boundary, and adds up the token's parts if it is the
first within the token's units.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.hopper.mla_combine import add_parts
from torch_paged_attn.backends.triton.hopper.selected_arguments import ListSizes
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
    last = tl.program_id(0).to(tl.int64)  # the group before the boundary
    token = total * (last + 1) // groups // units
    begin = token * units
    is_within = total * (last + 1) // groups > begin
    is_first = total * last // groups <= begin
    gdc_wait(IS_DEPENDENT)
    if is_within & is_first:
        stop = ((begin + units) * groups - 1) // total  # the group of the token's last unit
        has_sinks = token < tl.load(pointers.cu_seqlens_q + batch)
        add_parts(
            token, 0, last.to(tl.int32), (stop - last + 1).to(tl.int32), out_ptr, pointers,
            pointers.sinks, has_sinks, total_q, num_heads, programs, OPTIONS, SHARES,
        )  # fmt: skip
