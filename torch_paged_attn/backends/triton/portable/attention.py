"""From a checked call to a launch of the portable kernel.

Nothing here reads a tensor: grids, splits and scratch memory follow from shapes.
"""

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
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
from torch_paged_attn.backends.triton.runtime.workspace import Allocation, scratch
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
    plan = plan_attention(call, config=config, splits=splits)
    return plan(tuple(call.given().values()), None)


def plan_attention(
    call: AttentionCall, *, config: Config | None = None, splits: SplitPlan | None = None
) -> Plan:
    """A plan for the given tensors of calls like this one, in the order of the op's list."""
    target, device = target_of(call.q.device), call.q.device
    results = call.new_results()
    new_out, new_lse = map(Allocation.like, results)
    if call.total_q == 0:
        return lambda tensors, addresses: (new_out(), new_lse())
    traits = traits_of(call, target)
    tiles = choose_tiles(traits, call.total_q, call.batch, key_bound(call), config, splits)
    formats = formats_of(call, target, tiles.is_paired)
    num_parts = tiles.part_elements(call.head_dim_v)
    is_split, num_programs = tiles.is_split, tiles.num_programs

    pointers = arguments.pointers(call, formats, target, results, (None, None))
    stored = arguments.Pointers(*(x if x is None else x.dtype for x in pointers))
    pick = _picker(list(call.given()), pointers)
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

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        held = scratch(num_parts, num_programs, device) if is_split else None
        if launch.is_ready:
            shared = (None, None) if held is None else held.addresses
            launch.start(pick((*addresses, out.data_ptr(), lse.data_ptr(), *shared, None)))
            return out, lse
        parts, counters = (None, None) if held is None else (held.parts, held.counters)
        picked = zip(pick((*tensors, out, lse, parts, counters, None)), stored, strict=True)
        pointers = arguments.Pointers(
            *(x if t is None or t == x.dtype else x.view(t) for x, t in picked)
        )
        if is_traced():
            launch_in_graph(pointers)
        else:
            launch(pointers)
        return out, lse

    return run


def _picker(
    given: list[str], pointers: arguments.Pointers
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Picks the kernel's pointers out of the given tensors, results, scratch memory and None."""
    names = [*given, "out", "lse", "parts", "counters", None]
    made = ("parts", "counters")
    sources = [
        ARGUMENTS.get(name, name) if name in made or x is not None else None
        for name, x in pointers._asdict().items()
    ]
    return operator.itemgetter(*map(names.index, sources))
