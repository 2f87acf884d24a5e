"""How the kernel for latent attention with keys of 8 bits is launched: its forms, its options, and
its plan.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.dequant import PAIRED
from torch_paged_attn.backends.triton.hopper.mla_arguments import (
    MlaBytesPointers,
    MlaBytesScalars,
    MlaOptions,
)
from torch_paged_attn.backends.triton.hopper.mla_work import (
    READ_BY_ADDRESS,
    combine_launch,
    part_elements,
    programs_of,
    sizes_of,
)
from torch_paged_attn.backends.triton.hopper.support import DESCALES, mean_length
from torch_paged_attn.backends.triton.hopper.tma import ragged_rows
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import next_power_of_2
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.backends.triton.softmax import LOG2E

# keys of a block; columns of a box of them; columns that are no values
KEYS, BOX, ROPE = 64, 128, 64

# rows of the smallest tile
LEAST_ROWS = 16


class BytesForm(NamedTuple):
    """What the kernel is compiled in for a number of rows of a sequence."""

    rows: int  # of a tile of queries
    consumers: int  # of a program
    programs: int  # of a multiprocessor
    stages: int  # blocks of keys for which a program has room
    registers: int  # of a consumer's thread


# by the most rows of a sequence that the form is for; and the form for more rows, of several tiles
FORMS = {16: BytesForm(16, 1, 2, 2, 216), 32: BytesForm(32, 2, 1, 4, 232)}
OF_MANY_ROWS = BytesForm(32, 1, 2, 2, 216)


def form_of(call: AttentionCall) -> BytesForm:
    """The form for the rows of a sequence of mean length."""
    rows = next_power_of_2(call.num_heads) * mean_length(call)
    return next((FORMS[n] for n in sorted(FORMS) if n >= rows), OF_MANY_ROWS)


def options_of(call: AttentionCall) -> MlaOptions:
    """The options that the kernels are compiled for."""
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
        COLUMN_BOXES=1,
        ROWS=form.rows,
        UNIT_KEYS=KEYS * form.consumers,
        PROGRAMS=form.programs,
        FORMAT=PAIRED[call.k.dtype],
        CONSUMERS=form.consumers,
        STAGES=form.stages,
    )


def scalars_of(call: AttentionCall) -> MlaBytesScalars:
    """Numbers that follow from the description of a call."""
    # descales are one number, or (batch, 1): one for each sequence and the KV head
    given = [getattr(call, name) for name in DESCALES]
    strides = [0 if x is None or x.dim() < 2 else x.stride(0) for x in given]
    return MlaBytesScalars(
        num_heads=call.num_heads,
        page_rows=call.k.stride(0) // call.k.stride(2) if call.page_size else 0,
        scale_log2=call.scale * LOG2E.value,
        q_token=call.q.stride(0),
        q_head=call.q.stride(1),
        q_descale_batch=strides[0],
        k_descale_batch=strides[1],
        v_descale_batch=strides[2],
    )


def plan_launches(call: AttentionCall) -> Callable[..., None]:
    """A function that launches the kernels for calls like this one, as `mla.plan_launches` returns
    it; `out` has to be contiguous."""
    from torch_paged_attn.backends.triton.hopper.mla_bytes_kernel import (
        _hopper_mla_bytes_fwd_kernel,
    )

    options = options_of(call)
    programs = programs_of(call, options)
    new_parts = Allocation((part_elements(programs, options),), torch.float32, call.q.device)
    k = call.k if call.page_size == 0 else call.k[0].transpose(0, 1)
    k_boxes = [ragged_rows(k, options.BOX_ROWS, 1, width) for width in (BOX, ROPE)]
    # two programs of eight warps each share a multiprocessor's registers
    most = {} if options.PROGRAMS == 1 else {"maxnreg": 65536 // 256 // options.PROGRAMS}
    launch = Launch(
        _hopper_mla_bytes_fwd_kernel,
        (programs,),
        **sizes_of(call)._asdict(),
        scalars=scalars_of(call),
        OPTIONS=options,
        num_warps=4,
        launch_pdl=True,
        **most,
    )
    combine = combine_launch(call, options, programs)
    # a tensor that is not given is the None that `start` puts behind the given ones
    names = list(call.given_tensors())
    places = {name: i for i, name in enumerate(names)}
    pick = operator.itemgetter(*(places.get(name, len(names)) for name in READ_BY_ADDRESS))
    pick_more = operator.itemgetter(*(places.get(name, len(names)) for name in DESCALES))

    def start(tensors: tuple[Any, ...], addresses: Any, out: Tensor, lse: Tensor) -> None:
        parts = new_parts()
        if not (launch.is_ready and combine.is_ready) or addresses is None:
            given = (*tensors, None)
            memory = lse, *pick(given), parts, given[0], out, *pick_more(given)
            pointers = MlaBytesPointers._make(memory)
            k = tensors[1].data_ptr()
            launch(*(boxes.at(k) for boxes in k_boxes), pointers)
            combine(out, pointers)
            return
        boxes_at, given = launch.map_arguments, (*addresses, None)
        k, to = addresses[1], out.data_ptr()
        more = addresses[0], to, *pick_more(given)
        found = lse.data_ptr(), *pick(given), parts.data_ptr(), *more
        launch.start(*boxes_at(0, k_boxes[0], k), *boxes_at(1, k_boxes[1], k), found)
        combine.start(to, found)

    return start
