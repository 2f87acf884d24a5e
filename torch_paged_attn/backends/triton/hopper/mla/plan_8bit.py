"""How the kernel for latent attention with keys of 8 bits is launched: its forms and options."""

from typing import NamedTuple

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.dequant import PAIRED
from torch_paged_attn.backends.triton.common.softmax import LOG2E
from torch_paged_attn.backends.triton.hopper.common.tma import ragged_rows
from torch_paged_attn.backends.triton.hopper.mla.arguments import (
    MlaBytesPointers,
    MlaBytesScalars,
    MlaOptions,
)
from torch_paged_attn.backends.triton.hopper.mla.work import LatentLaunch, keys_of, sizes_of
from torch_paged_attn.backends.triton.hopper.support import DESCALES, mean_length
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import next_power_of_2

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


def latent_launch(call: AttentionCall, options: MlaOptions, programs: int) -> LatentLaunch:
    """The launch of the kernel for calls like this one."""
    from torch_paged_attn.backends.triton.hopper.mla.kernel_8bit import (
        _hopper_mla_bytes_fwd_kernel,
    )

    k = keys_of(call)
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
    boxes = [("k", ragged_rows(k, options.BOX_ROWS, 1, width)) for width in (BOX, ROPE)]
    return LatentLaunch(launch, boxes, MlaBytesPointers, ("q", "out", *DESCALES))
