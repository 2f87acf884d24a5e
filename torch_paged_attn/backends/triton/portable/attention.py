"""From a checked call to a launch of the portable kernel.

Nothing here reads a tensor: grids, splits and scratch memory follow from shapes.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, tensor_names
from torch_paged_attn.backends.triton.portable import arguments
from torch_paged_attn.backends.triton.portable.attention_kernel import _attention_fwd_kernel
from torch_paged_attn.backends.triton.portable.formats import formats_of
from torch_paged_attn.backends.triton.portable.graph_kernel import (
    _graph_attention_fwd_kernel,
    node_arguments,
)
from torch_paged_attn.backends.triton.portable.splits import SplitPlan
from torch_paged_attn.backends.triton.portable.tiles import choose_tiles, key_bound, traits_of
from torch_paged_attn.backends.triton.runtime.launch import (
    dependent_launch,
    is_traced,
    only_read,
)
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation, zeroed_counters
from torch_paged_attn.backends.triton.tuning import Config

# what the kernel's pointers are called in the list of arguments, where the names differ
ARGUMENTS = {
    "crow": "crow_indices",
    "col": "col_indices",
    "bias": "attn_bias",
    "alibi": "alibi_slopes",
    "rng": "rng_state",
}


def attend(
    call: AttentionCall, *, config: Config | None = None, splits: SplitPlan | None = None
) -> tuple[Tensor, Tensor]:
    """Plan the call and launch the kernel. `config` and `splits` override tables and rules."""
    tensors = call.tensors()
    plan = plan_attention(call, config=config, splits=splits)
    return plan(tuple(tensors[name] for name in tensor_names(call.op)), None)


def plan_attention(
    call: AttentionCall, *, config: Config | None = None, splits: SplitPlan | None = None
) -> Plan:
    """A plan for the tensors of calls like this one, in the order of the op's list."""
    results = call.new_results()
    new_out, new_lse = map(Allocation.like, results)
    if call.total_q == 0:
        return lambda tensors, addresses: (new_out(), new_lse())
    start = plan_launch(call, results, config=config, splits=splits)

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        start(tensors, addresses, out, lse)
        return out, lse

    return run


def plan_launch(
    call: AttentionCall,
    results: tuple[Tensor, Tensor],
    *,
    config: Config | None = None,
    splits: SplitPlan | None = None,
    tile_list: Tensor | None = None,
) -> Callable[..., None]:
    """A plan that is given where the results go, tensors like `results`.

    With a `tile_list` (or one like it, given last), this kernel runs beside the one before it and
    does the sequences that it leaves, and padding.
    """
    target, device = target_of(call.q.device), call.q.device
    traits = traits_of(call, target)
    tiles = choose_tiles(
        traits, call.total_q, call.batch, key_bound(call), config, splits, tile_list is not None
    )
    formats = formats_of(call, target, tiles.is_paired)
    new_parts = Allocation((tiles.part_elements(call.head_dim_v),), torch.float32, device)
    is_split, num_programs = tiles.is_split, tiles.num_programs

    pointers = arguments.pointers(call, formats, target, results, (None, None), tile_list)
    stored = arguments.Pointers(*(x if x is None else x.dtype for x in pointers))
    pick = _picker(call.op, pointers)
    strides, sizes = arguments.strides(call, pointers), arguments.sizes(call)
    scalars = arguments.scalars(call, formats, tiles)
    options = arguments.options(call, formats, tiles, target)
    of_compiler = arguments.compiler_options(tiles, target)
    launch = Launch(
        _attention_fwd_kernel,
        tiles.grid,
        strides=strides,
        scalars=scalars,
        **sizes._asdict(),
        OPTIONS=options,
        **dependent_launch(target.overlaps_launches),
        **of_compiler,
    )

    def launch_in_graph(pointers: arguments.Pointers) -> None:
        lengths = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
        copies = only_read(*(getattr(pointers, name) for name in lengths))
        pointers = pointers._replace(**dict(zip(lengths, copies, strict=True)))
        node = node_arguments(pointers, strides, sizes, scalars, options)
        Launch(_graph_attention_fwd_kernel, tiles.grid, **node, **of_compiler)()

    def start(
        tensors: tuple[Any, ...],
        addresses: Any,
        out: Tensor,
        lse: Tensor,
        tile_list: Tensor | None = None,
    ) -> None:
        parts: Any = None
        counters: Any = None
        if is_split:
            parts, counters = new_parts(), zeroed_counters(num_programs, device)
        if launch.is_ready:
            scratch = (parts.data_ptr(), counters.data_ptr()) if is_split else (None, None)
            listed = None if tile_list is None else tile_list.data_ptr()
            launch.start(pick((*addresses, out.data_ptr(), lse.data_ptr(), *scratch, listed, None)))
            return
        made = out, lse, parts, counters, tile_list, None
        picked = zip(pick((*tensors, *made)), stored, strict=True)
        pointers = arguments.Pointers(
            *(x if t is None or t == x.dtype else x.view(t) for x, t in picked)
        )
        if is_traced():
            launch_in_graph(pointers)
        else:
            launch(pointers)

    return start


def _picker(op: str, pointers: arguments.Pointers) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Picks the kernel's pointers out of the op's tensors, results, scratch memory and None."""
    names = [*tensor_names(op), "out", "lse", "parts", "counters", "tile_list", None]
    made = ("parts", "counters")
    sources = [
        ARGUMENTS.get(name, name) if name in made or x is not None else None
        for name, x in pointers._asdict().items()
    ]
    return operator.itemgetter(*map(names.index, sources))
