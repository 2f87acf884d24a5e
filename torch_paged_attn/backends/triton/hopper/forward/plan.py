"""`flash_varlen` and `blocksparse` on Hopper by tensor memory accelerator and warpgroup products.

`support.py` says what this kernel leaves to the portable one. Heads whose size is no power of two
lie in shared memory beside zeros that the accelerator fills in: the tensors stay as they are.

`plan_attention` has `choices.py` and `tiles.py` decide by a call's description and sizes; what it
returns launches the kernels for tensors of such calls, of which it needs addresses alone. Calls
that differ in sizes alone, and take the same tiles, share a `LaunchKind`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper.forward import choices, tiles
from torch_paged_attn.backends.triton.hopper.forward.arguments import Pointers, Sizes
from torch_paged_attn.backends.triton.hopper.forward.choices import FORM, Form
from torch_paged_attn.backends.triton.hopper.schedule.block_lists import (
    number_of_lists,
    plan_block_lists,
)
from torch_paged_attn.backends.triton.hopper.schedule.tile_scheduler import Lengths, plan_tile_list
from torch_paged_attn.backends.triton.hopper.support import key_bound
from torch_paged_attn.backends.triton.runtime.contiguous import picker
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan, kind_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation, ScratchOf
from torch_paged_attn.backends.triton.tuning import HopperConfig

# what a launch makes beside its results, and tensors of a layout
MADE = ("lse", "tile_list", "entries", "spans", "parts", "counters", "out")
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
    shape = call.total_q, call.num_heads, call.head_dim_v
    new_out = Allocation(shape, call.result_dtype, call.q.device)
    new_lse = Allocation((call.num_heads, call.total_q), torch.float32, call.q.device)
    if call.total_q == 0:
        return lambda tensors, addresses: (new_out(), new_lse())
    start = plan_launches(call, None, config, form)
    has_out = call.out is not None

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        out, lse = tensors[-1] if has_out else new_out(), new_lse()
        start(tensors, addresses, out, lse)
        return out, lse

    return run


class LaunchKind:
    """What launches share that differ in sizes and grid alone. Results are like `out`."""

    def __init__(
        self, call: AttentionCall, out: Tensor, config: HopperConfig, packed_heads: int, form: Form
    ) -> None:
        self.options = options = tiles.options_of(call, config, packed_heads, form)
        self.boxes = tiles.boxes_of(call, out, options)
        names = [*call.given_tensors(), *MADE]
        self.pick_lengths = picker(names, Lengths._fields)
        self.pick_layout = picker(names, LAYOUT)
        # not the lengths of tiles that are listed, nor what goes by tensor maps
        is_stored = options.FLOAT32_COLUMNS > 0 or options.MERGED_COLUMNS > 0
        left_out = {
            *(Lengths._fields if options.IS_LISTED else ()),
            *(() if options.GATHERS else ("k", "v")),
            *(() if is_stored else ("out",)),
        }
        self.pick = picker(names, [x if x not in left_out else None for x in Pointers._fields])
        self._scalars = tiles.scalars_of(call)
        # which products the compiler fuses with sums differs from row to row
        self._is_fused = not call.is_batch_invariant
        self._first: Launch | None = None
        # the first launch that lists tiles: of all sequences, and of some
        self.lists: tuple[list[Launch], list[Launch]] = [], []

    def launch(self, programs: int, sizes: Sizes) -> Launch:
        """A launch of so many programs; it is ready if the first one is."""
        from torch_paged_attn.backends.triton.hopper.forward.kernel import (
            _hopper_attention_fwd_kernel,
        )

        if self._first is not None:
            return self._first.resized((programs,), **sizes._asdict())
        self._first = Launch(
            _hopper_attention_fwd_kernel,
            (programs,),
            scalars=self._scalars,
            **sizes._asdict(),
            OPTIONS=self.options,
            num_warps=4,
            launch_pdl=True,
            enable_fp_fusion=self._is_fused,
        )
        return self._first


def _no_launches_yet(call: AttentionCall) -> dict[Any, LaunchKind]:
    """What calls share that differ in sizes alone: by the tiles that they take, their launches."""
    return {}


def _kind_of_launches(
    call: AttentionCall, out: Tensor | None, config: HopperConfig, packed_heads: int, form: Form
) -> LaunchKind:
    if out is not None:
        # where it lies may differ with the sizes
        return LaunchKind(call, out, config, packed_heads, form)
    # what of the sizes `tiles.options_of` and `scalars_of` go by
    parts = tiles.room_of(call, config, form)
    shares = tiles.shares_parts(call, parts, form)
    kinds, key = kind_of(call, _no_launches_yet), (config, packed_heads, form, parts, shares)
    if key not in kinds:
        kinds[key] = LaunchKind(call, call.new_results()[0], config, packed_heads, form)
    return kinds[key]


def plan_launches(
    call: AttentionCall,
    out: Tensor | None,
    config: HopperConfig | None = None,
    form: Form = FORM,
    skips: bool = False,
) -> Callable[..., None]:
    """A plan that is given where the results go: tensors like `out` and its lse, or if that is None
    contiguous tensors of their own. With `skips`, tiles are listed, and sequences with a negative
    number of keys have none: another launch writes their rows.
    """
    chosen, packed_heads = choices.choose_tiles(call, form)
    kind = _kind_of_launches(call, out, config or chosen, packed_heads, form)
    options = kind.options
    of_unlisted = tiles.units_in_turns(call, options, form)
    if options.IS_DEALT or options.IS_NUMBERED:
        of_unlisted = tiles.sizes_of_list(call)[2]
    list_tiles = None
    if options.IS_LISTED:
        list_tiles = plan_tile_list(
            *tiles.sizes_of_list(call),
            tiles.tile_options_of(options, skips),
            call.q.device,
            tiles.chip_of(call, options) if options.MOST_PARTS else None,
            tiles.parts_of(call, config or chosen, form),
            kind.lists[skips],
        )
    programs = tiles.grid_of(call, options, form)
    new_parts = scratch = None
    elements = tiles.part_elements(options, programs)
    if options.IS_DEALT or options.IS_NUMBERED:
        scratch = ScratchOf(elements, options.COUNTERS + 1, call.q.device)
    elif elements:
        new_parts = Allocation((elements,), torch.float32, call.q.device)
    build_lists, lists_per_head = None, 0
    if (layout := call.layout) is not None:
        shape = options.QUERIES_PER_LIST, options.KEYS_PER_ENTRY
        build_lists = plan_block_lists(layout, *shape, key_bound(call), options.IS_CAUSAL)
        lists_per_head = number_of_lists(layout, shape[0], key_bound(call))
    sizes = tiles.sizes_of(call, options, of_unlisted or lists_per_head, packed_heads)
    launch = kind.launch(programs, sizes)
    pick, pick_lengths, pick_layout = kind.pick, kind.pick_lengths, kind.pick_layout
    q_boxes, k_boxes, v_boxes, out_boxes = kind.boxes
    is_float32 = options.FLOAT32_COLUMNS > 0
    nothing = (None,) * len(MADE)

    def start(tensors: tuple[Any, ...], addresses: Any, out: Tensor, lse: Tensor) -> None:
        entries = spans = tile_list = parts = held = None
        if build_lists is not None:
            entries, spans = build_lists(*pick_layout((*tensors, *nothing, None)))
        if list_tiles is not None:
            lengths, at_lengths = pick_lengths((*tensors, *nothing, None)), None
            if addresses is not None:
                at_lengths = pick_lengths((*addresses, *nothing, None))
            tile_list = list_tiles(Lengths(*lengths), at_lengths)
        if new_parts is not None:
            parts = new_parts()
        if scratch is not None:
            held = scratch()
        if launch.is_ready and addresses is not None:
            at_q, at_out = addresses[0], out.data_ptr()
            lists = [None if x is None else x.data_ptr() for x in (tile_list, entries, spans)]
            at_parts, at_counters = None if parts is None else parts.data_ptr(), None
            if held is not None:
                at_parts, at_counters = held.addresses
                at_parts = at_parts if elements else None
            boxes_at = launch.map_arguments
            launch.start(
                *boxes_at(0, q_boxes, at_q),
                *boxes_at(1, k_boxes, addresses[1]),
                *boxes_at(2, v_boxes, addresses[2]),
                *boxes_at(3, out_boxes, at_q if is_float32 else at_out),
                pick((*addresses, lse.data_ptr(), *lists, at_parts, at_counters, at_out, None)),
            )
            return
        memory: tuple[Tensor | None, Tensor | None] = (parts, None)
        if held is not None:
            memory = (held.parts if elements else None, held.counters)
        q, k, v = tensors[:3]
        launch(
            q_boxes.at(q.data_ptr()),
            k_boxes.at(k.data_ptr()),
            v_boxes.at(v.data_ptr()),
            out_boxes.at((q if is_float32 else out).data_ptr()),
            Pointers(*pick((*tensors, lse, tile_list, entries, spans, *memory, out, None))),
        )

    return start
