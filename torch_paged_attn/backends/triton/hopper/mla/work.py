"""How the work of latent attention is cut: what the kernel is compiled in for keys of 16 and of 8
bits, how many programs share the keys, and the launch of the second kernel, which adds up the parts
that they leave.
"""

from typing import Any, NamedTuple

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.dequant import PAIRED
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.mla.arguments import MlaOptions, MlaSizes
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import cdiv, next_power_of_2, target_of

# columns of keys; the first 512 are the values
HEAD_DIM, HEAD_DIM_V = 576, 512

# with at least so many parts of a tile, a program of the second kernel adds up 64 at a time, and
# few columns; with more than so many rows, it takes two heads
MANY_PARTS, MANY_ROWS = 6, 1024

# one of so many groups of programs may stay idle if then the others end together
LEAST_BUSY = 16

# tensors that the kernels read by address, in the order of `MlaPointers`
READ_BY_ADDRESS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")


# and beside keys of 8 bits, in the order of the fields behind the parts
BESIDE_8_BITS = ("q", "out", *support.DESCALES)

# keys of a block
KEYS = 64

# boxes in which the columns of half a block of keys of 16 bits arrive
COLUMN_BOXES = 4


# `MlaOptions`, or those of another kernel for latents, which has these fields, too
Options = Any


class Form(NamedTuple):
    """What the kernel is compiled in for a number of rows of a sequence."""

    rows: int  # of a tile of queries
    consumers: int  # of a program
    programs: int  # of a multiprocessor
    stages: int  # blocks of keys of 8 bits for which a program has room
    registers: int  # of a consumer's thread


OF_16_BITS = Form(64, 2, 1, 0, 232)

# of keys of 8 bits, by the most rows of a sequence that the form is for; and the form for more
# rows, of several tiles
FORMS = {16: Form(16, 1, 2, 2, 216), 32: Form(32, 2, 1, 4, 232)}
OF_MANY_ROWS = Form(32, 1, 2, 2, 216)


def form_of(call: AttentionCall) -> Form:
    """The form for the rows of a sequence of mean length."""
    if not support.converts(call):
        return OF_16_BITS
    rows = next_power_of_2(call.num_heads) * support.mean_length(call)
    return next((FORMS[n] for n in sorted(FORMS) if n >= rows), OF_MANY_ROWS)


def options_of(call: AttentionCall) -> MlaOptions:
    form, page_size = form_of(call), call.page_size
    packed = min(next_power_of_2(call.num_heads), form.rows)
    return MlaOptions(
        TOKENS=form.rows // packed,
        PACKED_HEADS=packed,
        HEAD_TILES=-(-call.num_heads // packed),
        PAGE_SIZE=page_size,
        # the largest power of two that divides a page
        BOX_ROWS=min(page_size & -page_size, KEYS) if page_size else KEYS,
        IS_CAUSAL=call.window_right == 0,
        REGISTERS=form.registers,
        COLUMN_BOXES=1 if support.converts(call) else COLUMN_BOXES,
        ROWS=form.rows,
        UNIT_KEYS=KEYS * form.consumers,
        PROGRAMS=form.programs,
        CONSUMERS=form.consumers,
        FORMAT=PAIRED[call.k.dtype] if support.converts(call) else "",
        STAGES=form.stages,
    )


def keys_of(call: AttentionCall) -> Tensor:
    """Keys as (rows, heads, columns), of which tensor maps are made: those of a page, if any."""
    return call.k if call.page_size == 0 else call.k[0].transpose(0, 1)


def sizes_of(call: AttentionCall) -> MlaSizes:
    return MlaSizes(
        num_pages=call.k.shape[0],
        batch=call.batch,
        total_q=call.total_q,
        max_keys=min(support.key_bound(call), 2**31 - 1),
        stride_table=0 if call.block_table is None else call.block_table.stride(0),
    )


def tiles_of(call: AttentionCall, options: Options) -> int:
    """Tiles of tokens, for one tile of heads, if each sequence has the mean number of queries."""
    queries = -(-call.total_q // max(call.batch, 1))
    return max(call.batch * -(-queries // options.TOKENS), 1)


def programs_of(call: AttentionCall, options: Options) -> int:
    """Programs of the first kernel: as many as multiprocessors have room for, the same number for
    each tile of heads. A few less, if then tiles of equal length are each done by one program, or
    cut in parts of equal length.
    """
    room = target_of(call.q.device).multiprocessors * options.PROGRAMS
    groups = max(room // options.HEAD_TILES, 1)
    return even_groups(tiles_of(call, options), groups) * options.HEAD_TILES


def even_groups(tiles: int, groups: int) -> int:
    """So many groups of programs or a few less, if then tiles of equal length are each done by one
    group, or cut in parts of equal length."""
    even = -(-tiles // -(-tiles // groups)) * max(groups // tiles, 1)
    return even if even * LEAST_BUSY >= groups * (LEAST_BUSY - 1) else groups


def shares_of_combine(call: AttentionCall, options: Options, programs: int) -> tuple[int, int, int]:
    """The share of one program of the second kernel: heads, parts that it adds up at a time, and
    columns. `programs`: of the first kernel."""
    parts = programs // options.HEAD_TILES // tiles_of(call, options)
    return shares_of(parts, call.total_q * call.num_heads)


def shares_of(parts: int, rows: int) -> tuple[int, int, int]:
    """The same for so many parts of a tile, and rows of all tiles."""
    if parts >= MANY_PARTS:
        return 1, 64, 128
    return (2, 2, 512) if rows > MANY_ROWS else (1, 4, 512)


def part_elements(programs: int, options: Options) -> int:
    """float32 numbers in the workspace for parts, two of each program: rows of values, then their
    references and sums (`combine.py`)."""
    return 2 * programs * options.ROWS * (HEAD_DIM_V + 2)


def first_launch(kernel: Any, programs: int, options: Any, sizes: Any, scalars: Any) -> Launch:
    """The launch of a kernel that visits keys. Programs of eight warps that a multiprocessor has
    room for share its registers."""
    most = {} if options.PROGRAMS == 1 else {"maxnreg": 65536 // 256 // options.PROGRAMS}
    return Launch(
        kernel,
        (programs,),
        **sizes._asdict(),
        scalars=scalars,
        OPTIONS=options,
        num_warps=4,
        launch_pdl=True,
        **most,
    )


def second_launch(
    kernel: Any, tokens: int, shares: tuple[int, int, int], programs: int, call: AttentionCall,
    options: Any, sizes: Any,
) -> Launch:  # fmt: skip
    """The launch of a kernel that adds up parts of so many tokens. `shares`: see `shares_of`."""
    heads, _, columns = shares
    return Launch(
        kernel,
        (tokens, cdiv(call.num_heads, heads), HEAD_DIM_V // columns),
        **sizes._asdict(),
        num_heads=call.num_heads,
        programs=programs,
        OPTIONS=options,
        SHARES=shares,
        num_warps=4,
        **dependent_launch(target_of(call.q.device).overlaps_launches),
    )


def combine_launch(call: AttentionCall, options: Options, programs: int) -> Launch:
    """The launch of the second kernel. It is called with `out` and the pointers of the first one,
    which has `programs` programs."""
    from torch_paged_attn.backends.triton.hopper.mla.combine import _hopper_mla_combine_kernel

    shares = shares_of_combine(call, options, programs)
    kernel, sizes = _hopper_mla_combine_kernel, sizes_of(call)
    return second_launch(kernel, call.total_q, shares, programs, call, options, sizes)
