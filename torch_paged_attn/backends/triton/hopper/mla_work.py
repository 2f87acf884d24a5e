"""What launches of latent attention's kernels share: how the keys are dealt out to programs, and
the second kernel, which adds up what they leave.
"""

from typing import Any

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper.mla_arguments import MlaOptions, MlaSizes
from torch_paged_attn.backends.triton.hopper.support import key_bound
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import target_of

# columns of keys, of which the first are the values
HEAD_DIM, HEAD_DIM_V = 576, 512

# parts of a tile from which on a program of the second kernel takes many of them and few columns,
# and rows from which on it takes two
MANY_PARTS, MANY_ROWS = 6, 1024

# of so many groups of programs one may be left out to have the others end together
LEAST_BUSY = 16

READ_BY_ADDRESS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")


def sizes_of(call: AttentionCall) -> MlaSizes:
    """Numbers that differ from call to call."""
    return MlaSizes(
        num_pages=call.k.shape[0],
        batch=call.batch,
        total_q=call.total_q,
        max_keys=min(key_bound(call), 2**31 - 1),
        stride_table=0 if call.block_table is None else call.block_table.stride(0),
    )


def tiles_of(call: AttentionCall, options: MlaOptions) -> int:
    """Tiles of one tile of heads, if sequences have the mean number of queries."""
    queries = -(-call.total_q // max(call.batch, 1))
    return max(call.batch * -(-queries // options.TOKENS), 1)


def programs_of(call: AttentionCall, options: MlaOptions) -> int:
    """Programs, as many as multiprocessors have room for: as many for each tile of heads, and a few
    less if then sequences of one length are whole in a program, or cut in parts of one length.
    """
    room = target_of(call.q.device).multiprocessors * options.PROGRAMS
    groups = max(room // options.HEAD_TILES, 1)
    tiles = tiles_of(call, options)
    even = -(-tiles // -(-tiles // groups)) * max(groups // tiles, 1)
    if even * LEAST_BUSY < groups * (LEAST_BUSY - 1):
        even = groups
    return even * options.HEAD_TILES


def shares_of_combine(
    call: AttentionCall, options: MlaOptions, programs: int
) -> tuple[int, int, int]:
    """Of a program of the second kernel: its heads, the parts that it adds up at a time, and its
    columns."""
    parts = programs // options.HEAD_TILES // tiles_of(call, options)
    if parts >= MANY_PARTS:
        return 1, 64, 128
    return (2, 2, 512) if call.total_q * call.num_heads > MANY_ROWS else (1, 4, 512)


def part_elements(programs: int, options: MlaOptions) -> int:
    """Numbers that programs leave: rows of values, then their references and sums."""
    return 2 * programs * options.ROWS * (HEAD_DIM_V + 2)


def combine_launch(call: AttentionCall, options: MlaOptions, programs: int) -> Launch:
    """The launch of the second kernel, which is given `out` and the pointers of the first."""
    from torch_paged_attn.backends.triton.hopper.mla_combine import _hopper_mla_combine_kernel

    heads, at_a_time, columns = shares_of_combine(call, options, programs)
    more: dict[str, Any] = dependent_launch(target_of(call.q.device).overlaps_launches)
    return Launch(
        _hopper_mla_combine_kernel,
        (call.total_q, -(-call.num_heads // heads), HEAD_DIM_V // columns),
        **sizes_of(call)._asdict(),
        num_heads=call.num_heads,
        programs=programs,
        OPTIONS=options,
        SHARES=(heads, at_a_time, columns),
        num_warps=4,
        **more,
    )
