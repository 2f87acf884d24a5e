"""`selected_attention` on Hopper for lists of single tokens and latent keys: one KV head, whose
values are 512 wide and are the first columns of the keys.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, is_by_column
from torch_paged_attn.backends.triton.common.softmax import LOG2E
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.mla import work
from torch_paged_attn.backends.triton.hopper.mla.plan import HALF, ROPE
from torch_paged_attn.backends.triton.hopper.selected.arguments import (
    ListOptions,
    ListPointers,
    ListScalars,
    ListSizes,
)
from torch_paged_attn.backends.triton.runtime.contiguous import picker
from torch_paged_attn.backends.triton.runtime.launch import is_traced
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import cdiv, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation

# registers of a consumer's thread, and column boxes in which half of a block's columns arrive
REGISTERS = 224
COLUMN_BOXES = 2

# heads of a tile (`few_heads.py`), or BLOCK_M for more
FEWEST_HEADS, FEW_HEADS = 8, 16

# keys of a pair of blocks, and bytes of the pieces that a thread copies
PAIR, PIECE = 128, 16


class ScaledForm(NamedTuple):
    """What the kernel for latents of 8 bits has room for."""

    stored: int  # groups of columns of 8 bits
    converted: int  # groups of columns of 16 bits
    converters: int  # groups of warps that convert; 0: consumers do
    programs: int  # of a multiprocessor
    registers: int  # of a consumer's thread


# by heads of a tile
SCALED_FORMS = {
    FEWEST_HEADS: ScaledForm(8, 0, 0, 2, 200),
    FEW_HEADS: ScaledForm(5, 8, 1, 1, REGISTERS),
}

# with more tokens than this to each group of programs, all groups have a share
FEW_TOKENS = 8


def unsupported(call: AttentionCall) -> str | None:
    """Why a call cannot take this kernel; None if it can."""
    q, k, v, latent, selection = call.q, call.k, call.v, call.q_latent, call.lists
    rope = ROPE if latent is not None else work.HEAD_DIM
    if call.num_kv_heads != 1 or call.head_dim_v != work.HEAD_DIM_V:
        return "it is no latent attention"
    if call.head_dim not in ((rope,) if latent is not None else (work.HEAD_DIM, work.HEAD_DIM_V)):
        return f"head_dim is {call.head_dim}"
    if selection.select_size != 1:
        return f"select_size is {selection.select_size}"
    if (reason := support.unsupported_device(q.device)) is not None:
        return reason
    has_scales = is_by_column(call.v_descale, v)
    if has_scales:
        if (reason := unsupported_scales(call)) is not None:
            return reason
    elif q.dtype not in support.IN_16_BITS or not k.dtype == v.dtype == q.dtype:
        return f"q is {q.dtype}, k {k.dtype} and v {v.dtype}"
    if call.result_dtype != q.dtype:
        return f"out_dtype is {call.out_dtype}"
    for name in support.DESCALES:
        if getattr(call, name) is not None and not (has_scales and name == "v_descale"):
            return f"it has no {name}"
    if call.softcap:
        return "it has no softcap"
    if not support.LEAST_SCALE <= call.scale <= 1.0 / support.LEAST_SCALE:
        return f"softmax_scale is {call.softmax_scale}"
    if 0 in k.shape:
        return "there are no keys"
    # what is traced has no address yet
    is_apart = not is_traced() and k.data_ptr() != v.data_ptr()
    if latent is None and (is_apart or not _are_one_row(call)):
        return "the values are no columns of the keys"
    if any(support.is_misaligned(x, x.dim() - 1) for x in (q, k, v)):
        return "q, k or v is not aligned to 16 bytes"
    if latent is not None and support.is_misaligned(latent, 2):
        return "q_latent is not aligned to 16 bytes"
    return None


def unsupported_scales(call: AttentionCall) -> str | None:
    """Why a call cannot take the kernel for latents of 8 bits; None if it can."""
    q, k, v, scales = call.q, call.k, call.v, call.v_descale
    assert scales is not None
    # weights times scales need the range of bfloat16
    if not (q.dtype == k.dtype == torch.bfloat16 and v.dtype == torch.float8_e4m3fn):
        return f"q is {q.dtype}, k {k.dtype} and v {v.dtype}, with scales by column"
    if call.q_latent is None:
        return "q_latent is not given, with scales by column"
    if call.num_heads > FEW_HEADS:
        return f"more than {FEW_HEADS} heads, with scales by column"
    if not _are_one_row(call) or pieces(call, scales) != pieces(call, v):
        return "rope keys, latents and scales do not lie equally far apart"
    if scales.stride(-1) != 1 or support.is_misaligned(scales, scales.dim() - 1):
        return "v_descale is not aligned to 16 bytes"
    return None


def pieces(call: AttentionCall, x: Tensor) -> tuple[int, int]:
    """How many pieces of 16 bytes pages and slots of keys are apart."""
    page, slot = (x.stride(0), x.stride(2)) if call.is_paged else (0, x.stride(0))
    return page * x.itemsize // PIECE, slot * x.itemsize // PIECE


def _are_one_row(call: AttentionCall) -> bool:
    """Whether rows of keys lie as far apart as rows of values."""
    return pieces(call, call.k) == pieces(call, call.v)


def options_of(call: AttentionCall) -> ListOptions:
    has_latent = call.q_latent is not None
    has_scales = is_by_column(call.v_descale, call.v)
    heads = next((n for n in (FEWEST_HEADS, FEW_HEADS) if call.num_heads <= n), support.BLOCK_M)
    form = SCALED_FORMS[heads] if has_scales else ScaledForm(0, 0, 0, 1, REGISTERS)
    return ListOptions(
        HEAD_TILES=cdiv(call.num_heads, heads),
        PAGE_SIZE=call.page_size,
        IS_SLOTS=call.is_slots,
        HAS_LEFT=support.is_bound(call.window_size_left),
        HAS_RIGHT=support.is_bound(call.window_right),
        HAS_ROPE=has_latent or call.head_dim > work.HEAD_DIM_V,
        IS_ONE_ROW=_are_one_row(call),
        ROPE_COLUMN=work.HEAD_DIM_V if call.head_dim == work.HEAD_DIM else 0,
        REGISTERS=form.registers,
        # 8 heads take the time of the copies, which barriers slow down
        COLUMN_BOXES=1 if heads == FEWEST_HEADS else COLUMN_BOXES,
        PACKED_HEADS=heads,
        ROWS=heads,
        HAS_SCALES=has_scales,
        STAGES=form.stored,
        CONVERTED=form.converted,
        CONVERTERS=form.converters,
        PROGRAMS=form.programs,
    )


def pairs_of(call: AttentionCall) -> int:
    """Pairs of blocks of keys of a list."""
    return max(cdiv(call.lists.key_indices.shape[2], PAIR), 1)


def shares_of_call(call: AttentionCall, options: ListOptions) -> tuple[int, int, int]:
    """How many groups of programs there are; units of a token: its pairs of blocks, or one where no
    groups share a token; and float32 numbers of the workspace."""
    pairs, tokens = pairs_of(call), call.total_q
    programs = options.PROGRAMS * target_of(call.q.device).multiprocessors
    room = max(programs // options.HEAD_TILES, 1)
    if call.is_batch_invariant:
        return min(room, tokens), 1, 0
    groups = room if tokens > FEW_TOKENS * room else work.even_groups(tokens, room)
    groups = min(groups, tokens * pairs)
    if tokens % groups == 0:
        return groups, 1, 0
    parts = 2 * groups * options.HEAD_TILES  # two of each program
    return groups, pairs, parts * options.ROWS * (work.HEAD_DIM_V + 2)


def sizes_of(call: AttentionCall, units: int) -> ListSizes:
    selection, table = call.lists, call.block_table
    indices, counts = selection.key_indices, selection.num_selected
    return ListSizes(
        total_q=call.total_q,
        batch=call.batch,
        entries=indices.shape[2],
        num_rows=call.k.shape[0],
        max_pages=0 if table is None else table.shape[1],
        stride_index_token=indices.stride(0),
        stride_count_token=0 if counts is None else counts.stride(0),
        stride_table=0 if table is None else table.stride(0),
        units=units,
        unit_pairs=pairs_of(call) // units,
    )


def scalars_of(call: AttentionCall) -> ListScalars:
    selection = call.lists
    return ListScalars(
        call.num_heads,
        selection.key_indices.stride(2),
        *pieces(call, call.v),
        *pieces(call, call.k),
        left=min(call.window_size_left, support.UNBOUNDED),
        right=min(call.window_right, support.UNBOUNDED),
        scale_log2=call.scale * LOG2E.value,
    )


class Launches(NamedTuple):
    """What runs calls like one: the kernel, and the one that adds up what groups of programs found
    of tokens that they share, unless none do."""

    options: ListOptions
    first: Launch
    combine: Launch | None
    elements: int  # float32 numbers of the workspace


def launches_of(call: AttentionCall) -> Launches:
    """The launches of a call of lists."""
    from torch_paged_attn.backends.triton.hopper.selected.kernel import _hopper_selected_fwd_kernel

    options = options_of(call)
    groups, units, elements = shares_of_call(call, options)
    programs, kernel = groups * options.HEAD_TILES, _hopper_selected_fwd_kernel
    first = work.first_launch(kernel, programs, options, sizes_of(call, units), scalars_of(call))
    combine = _combine_launch(call, options, groups, units) if units > 1 else None
    return Launches(options, first, combine, elements)


def plan_launches(call: AttentionCall, given: list[str], launches: Launches) -> Callable[..., None]:
    """A function that launches the kernels for calls like this one, which have tensors of these
    names. It takes the given tensors, their addresses or None, and the tensors for results.
    """
    from torch_paged_attn.backends.triton.hopper.common.tma import ragged_rows

    options, launch, combine, elements = launches
    new_parts = Allocation((elements,), torch.float32, call.q.device)
    boxes = [
        ragged_rows(x, 1, options.PACKED_HEADS, width)
        for x, width in ((call.q if call.q_latent is None else call.q_latent, HALF), (call.q, ROPE))
    ]
    named = "q_latent", "k", "v", *ListPointers._fields[5:-1], "v_descale"
    pick = picker(given, named)
    column, has_ropes = options.ROPE_COLUMN, options.HAS_ROPE
    column_bytes = column * call.k.itemsize

    def start(tensors: tuple[Any, ...], addresses: Any, out: Tensor, lse: Tensor) -> None:
        # of the same type, and not written if no groups share a token
        parts = new_parts() if elements else lse
        if launch.is_ready and addresses is not None and (combine is None or combine.is_ready):
            latent, k, v, *others = pick((*addresses, None))
            q = addresses[0]
            at = (
                *(out.data_ptr(), lse.data_ptr(), parts.data_ptr(), v),
                k + column_bytes if has_ropes else None,
                *others,
            )
            boxes_at = launch.map_arguments
            launch.start(
                *boxes_at(0, boxes[0], q if latent is None else latent),
                *boxes_at(1, boxes[1], q),
                at,
            )
            if combine is not None:
                combine.start(at[0], at)
            return
        latent, k, v, *others = pick((*tensors, None))
        q = tensors[0]
        ropes = k[..., column:] if has_ropes else None
        pointers = ListPointers(out, lse, parts, v, ropes, *others)
        latents = q if latent is None else latent
        launch(boxes[0].at(latents.data_ptr()), boxes[1].at(q.data_ptr()), pointers)
        if combine is not None:
            combine(out, pointers)

    return start


def _combine_launch(call: AttentionCall, options: ListOptions, groups: int, units: int) -> Launch:
    """The launch that adds up what groups of programs found of tokens that they share."""
    from torch_paged_attn.backends.triton.hopper.selected.combine import (
        _hopper_selected_combine_kernel,
    )

    shares = work.shares_of(groups // call.total_q, call.total_q * call.num_heads)
    tokens, programs = min(call.total_q, groups - 1), groups * options.HEAD_TILES
    kernel, sizes = _hopper_selected_combine_kernel, sizes_of(call, units)
    return work.second_launch(kernel, tokens, shares, programs, call, options, sizes)
