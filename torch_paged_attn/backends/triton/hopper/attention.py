"""`flash_varlen` and `blocksparse` on Hopper by tensor memory accelerator and warpgroup products.

`support.py` says what this kernel leaves to the portable one. Heads whose size is no power of two
lie in shared memory beside zeros that the accelerator fills in: the tensors stay as they are.

`plan_attention` has `choices.py` and `tiles.py` decide by a call's description and sizes; what it
returns launches the kernels for tensors of such calls, of which it needs addresses alone.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper import choices, tiles
from torch_paged_attn.backends.triton.hopper.arguments import Pointers
from torch_paged_attn.backends.triton.hopper.block_lists import number_of_lists, plan_block_lists
from torch_paged_attn.backends.triton.hopper.choices import FORM, Form
from torch_paged_attn.backends.triton.hopper.support import DESCALES, key_bound
from torch_paged_attn.backends.triton.hopper.tile_scheduler import Lengths, plan_tile_list
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.workspace import Allocation, ScratchOf
from torch_paged_attn.backends.triton.tuning import HopperConfig

# tensors that the kernels read by address, and those of a layout
READ_BY_ADDRESS = (*DESCALES, *Lengths._fields, "block_table", "alibi_slopes", "sinks")
LAYOUT = ("crow_indices", "col_indices")


def attend(
    call: AttentionCall, config: HopperConfig | None = None, form: Form = FORM
) -> tuple[Tensor, Tensor]:
    """Plan a call for which `unsupported` has no reason, and launch the kernels."""
    plan = plan_attention(call, config, form)
    return plan(tuple(call.given_tensors().values()), None)


def plan_attention(
    call: AttentionCall, config: HopperConfig | None = None, form: Form = FORM
) -> Plan:
    """A plan for the given tensors of calls like this one, in the order of the op's list."""
    results = call.new_results()
    new_out, new_lse = map(Allocation.like, results)
    if call.total_q == 0:
        return lambda tensors, addresses: (new_out(), new_lse())
    start = plan_launches(call, results[0], config, form)

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        start(tensors, addresses, out, lse)
        return out, lse

    return run


def plan_launches(
    call: AttentionCall,
    out: Tensor,
    config: HopperConfig | None = None,
    form: Form = FORM,
) -> Callable[..., tuple[Tensor | None, Tensor | None]]:
    """A plan that is given where the results go, tensors like `out` and its lse.

    Another kernel, which does what `form.short` leaves to it, may start before this one ends. What
    the plan returns, the list of tiles and other memory of this kernel's, is to be kept until that
    is launched.
    """
    from torch_paged_attn.backends.triton.hopper.attention_kernel import (
        _hopper_attention_fwd_kernel,
    )

    chosen, packed_heads = choices.choose_tiles(call, form)
    options = tiles.options_of(call, config or chosen, packed_heads, form)
    of_unlisted = tiles.units_in_turns(call, options, form)
    if options.IS_DEALT or options.IS_NUMBERED:
        of_unlisted = tiles.sizes_of_list(call)[2]
    list_tiles = None
    if options.IS_LISTED:
        list_tiles = plan_tile_list(
            *tiles.sizes_of_list(call),
            tiles.tile_options_of(options, form),
            call.q.device,
            tiles.chip_of(call, options) if options.MOST_PARTS or form.short else None,
        )
    programs = tiles.grid_of(call, options, form)
    new_parts = scratch = None
    elements = tiles.part_elements(options, programs)
    if options.IS_DEALT:
        scratch = ScratchOf(elements, options.COUNTERS, call.q.device)
    elif elements:
        new_parts = Allocation((elements,), torch.float32, call.q.device)
    build_lists, lists_per_head = None, 0
    if (layout := call.layout) is not None:
        shape = options.QUERIES_PER_LIST, options.KEYS_PER_ENTRY
        build_lists = plan_block_lists(layout, *shape, key_bound(call), options.IS_CAUSAL)
        lists_per_head = number_of_lists(layout, shape[0], key_bound(call))
    q_boxes, k_boxes, v_boxes, out_boxes = tiles.boxes_of(call, out, options)
    # what is not given is the None behind the tensors
    names = list(call.given_tensors())
    places = {name: i for i, name in enumerate(names)}
    pick = operator.itemgetter(*(places.get(name, len(names)) for name in READ_BY_ADDRESS))
    pick_layout = operator.itemgetter(*(places[name] for name in LAYOUT)) if layout else None
    launch = Launch(
        _hopper_attention_fwd_kernel,
        (programs,),
        scalars=tiles.scalars_of(call, packed_heads),
        **tiles.sizes_of(call, of_unlisted or lists_per_head)._asdict(),
        OPTIONS=options,
        num_warps=4,
        launch_pdl=True,
        # which products the compiler fuses with sums differs from row to row
        enable_fp_fusion=not call.is_batch_invariant,
    )

    is_float32 = options.FLOAT32_COLUMNS > 0
    is_stored = is_float32 or options.MERGED_COLUMNS > 0
    # the lengths that the kernel reads itself where tiles are not listed
    none = (None,) * 3

    def start(
        tensors: tuple[Any, ...], addresses: Any, out: Tensor, lse: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        of_q, of_k, of_v, *lengths, block_table, alibi_slopes, sinks = pick((*tensors, None))
        entries = spans = None
        if build_lists is not None and pick_layout is not None:
            entries, spans = build_lists(*pick_layout(tensors))
        parts = None if new_parts is None else new_parts()
        held = None if scratch is None else scratch()
        if not launch.is_ready or addresses is None:
            q, k, v = tensors[:3]
            tile_list, unlisted = None, lengths[: len(none)]
            counters, left = None, parts
            if held is not None:
                left, counters = held.parts, held.counters
            if list_tiles is not None:
                tile_list, unlisted = list_tiles(Lengths(*lengths)), none
            launch(
                q_boxes.at(q.data_ptr()),
                k_boxes.at(k.data_ptr()),
                v_boxes.at(v.data_ptr()),
                out_boxes.at((q if is_float32 else out).data_ptr()),
                Pointers(
                    lse, tile_list, block_table, entries, spans, alibi_slopes, sinks, left,
                    of_q, of_k, of_v, *unlisted,
                    *((k, v) if options.GATHERS else (None, None)),
                )._replace(out=out if is_stored else None, counters=counters),
            )  # fmt: skip
            return tile_list, parts
        of_q, of_k, of_v, *starts, table, slopes, sink = pick((*addresses, None))
        tile_list, at_list, unlisted = None, None, starts[: len(none)]
        at_out = out.data_ptr()
        if list_tiles is not None:
            tile_list, unlisted = list_tiles(Lengths(*lengths), tuple(starts)), none
            at_list = tile_list.data_ptr()
        boxes_at = launch.map_arguments
        lists = tuple(None if x is None else x.data_ptr() for x in (entries, spans))
        slots = addresses[1:3] if options.GATHERS else (None, None)
        at_parts, at_counters = None if parts is None else parts.data_ptr(), None
        if held is not None:
            at_parts, at_counters = held.addresses
        pointers = (
            lse.data_ptr(), at_list, table, *lists, slopes, sink, at_parts, of_q, of_k, of_v,
            *unlisted,
        )  # fmt: skip
        launch.start(
            *boxes_at(0, q_boxes, addresses[0]),
            *boxes_at(1, k_boxes, addresses[1]),
            *boxes_at(2, v_boxes, addresses[2]),
            *boxes_at(3, out_boxes, addresses[0] if is_float32 else at_out),
            (*pointers, *slots, at_out if is_stored else None, at_counters),
        )
        return tile_list, parts

    return start
