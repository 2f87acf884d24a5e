"""The host's side of the portable kernel: it plans a checked call and launches it.

Grids, splits and scratch memory are chosen from shapes; no tensor value is read.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.seqlen_info import key_bound, num_tiles
from torch_paged_attn.backends.triton.portable.common import groups
from torch_paged_attn.backends.triton.portable.common.formats import formats_of
from torch_paged_attn.backends.triton.portable.common.seen_tiles import has_map, plan_map
from torch_paged_attn.backends.triton.portable.forward import arguments
from torch_paged_attn.backends.triton.portable.forward.graph_kernel import (
    _graph_attention_fwd_kernel,
    node_arguments,
)
from torch_paged_attn.backends.triton.portable.forward.kernel import _attention_fwd_kernel
from torch_paged_attn.backends.triton.portable.forward.splits import SplitPlan
from torch_paged_attn.backends.triton.portable.forward.tiles import Tiles, choose_tiles, traits_of
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch, is_traced, only_read
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan, kind_of
from torch_paged_attn.backends.triton.runtime.target import Target, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation, ScratchOf
from torch_paged_attn.backends.triton.tuning import Config


def attend(
    call: AttentionCall,
    *,
    config: Config | None = None,
    splits: SplitPlan | None = None,
    longest: int = 0,
) -> tuple[Tensor, Tensor]:
    """Plan the call and launch the kernel. The options are those of `plan_attention`."""
    plan = plan_attention(call, config=config, splits=splits, longest=longest)
    tensors = tuple(call.given_tensors().values())
    # a launch that was made before takes addresses
    return plan(tensors, None if is_traced() else [x.data_ptr() for x in tensors])


def plan_attention(
    call: AttentionCall,
    *,
    config: Config | None = None,
    splits: SplitPlan | None = None,
    longest: int = 0,
) -> Plan:
    """A plan for calls like this one. It takes the given tensors in the order of the op's list.

    config, splits: instead of those that `choose_tiles` would choose
    longest: if not 0, max_seqlen_q: programs of a sequence take its tiles in turns
        (`_attend_in_turns`)
    """
    if call.total_q == 0:
        new_out, new_lse = map(Allocation.like, call.new_results())
        return lambda tensors, addresses: (new_out(), new_lse())
    kind = kind_of(call, Kind)
    sizes = call.total_q, call.batch, key_bound(call)
    tiles = choose_tiles(kind.traits, *sizes, config, splits, longest=longest)
    return kind.plan(call, tiles)


def plan_few(call: AttentionCall) -> Callable[..., None]:
    """A plan for the sequences of few queries of a batch whose others have a negative number of
    keys: another launch writes their rows. It is given where the results go.
    """
    kind = kind_of(call, Kind)
    # most are decodes, for which tiles of one query are twice as fast
    tiles = choose_tiles(kind.traits, call.batch, call.batch, key_bound(call))
    if not tiles.is_split:
        grid = num_tiles(call.total_q, call.batch, tiles.tokens, tiles.gap), tiles.grid[1]
        tiles = dataclasses.replace(tiles, grid=grid)
    return kind.start(call, tiles, skips=True)[0]


class Kind:
    """What calls share that differ in sizes only: traits, and launches for each kind of tiles."""

    def __init__(self, call: AttentionCall) -> None:
        self.target, self.device = target_of(call.q.device), call.q.device
        self.traits = traits_of(call, self.target)
        # by the properties of the tiles for which a kernel is compiled
        self._launches: dict[tuple[Any, ...], LaunchKind] = {}

    def plan(self, call: AttentionCall, tiles: Tiles) -> Plan:
        """The plan for a call of this kind."""
        start, kind = self.start(call, tiles)
        new_out, new_lse = kind.results(call.total_q)
        has_out = call.out is not None

        def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
            out, lse = tensors[-1] if has_out else new_out(), new_lse()
            start(tensors, addresses, out, lse)
            return out, lse

        return run

    def start(
        self, call: AttentionCall, tiles: Tiles, skips: bool = False
    ) -> "tuple[Callable[..., None], LaunchKind]":
        """The plan for a call of this kind that is given where the results go, and what launches
        with these tiles share. `skips`: see `plan_few`.
        """
        map_of = _plan_map_of(call) if has_map(call) and not skips else None
        kind, launch, scratch = self._launch(call, tiles, skips, map_of is not None)
        sizes, pick = arguments.sizes(call), kind.pick

        def start(tensors: tuple[Any, ...], addresses: Any, out: Tensor, lse: Tensor) -> None:
            held = None if scratch is None else scratch()
            seen = None if map_of is None else map_of(tensors)
            if launch.is_ready:
                shared = (None, None) if held is None else held.addresses
                made = *shared, None if seen is None else seen.data_ptr()
                launch.start(pick((*addresses, out.data_ptr(), lse.data_ptr(), *made, None)))
                return
            memory = (None, None) if held is None else (held.parts, held.counters)
            pointers = kind.pointers((*tensors, out, lse, *memory, seen, None))
            if is_traced():
                kind.launch_in_graph(pointers, tiles.grid, sizes)
            else:
                launch(pointers)

        return start, kind

    def _launch(
        self, call: AttentionCall, tiles: Tiles, skips: bool, has_map: bool
    ) -> "tuple[LaunchKind, Launch, ScratchOf | None]":
        """What launches with these tiles share, the launch of this call, and its scratch memory."""
        kind = self._launches.get(key := (skips, has_map, *tiles.of_kernel()))
        if kind is None:
            kind = self._launches[key] = LaunchKind(call, tiles, self.target, skips)
            launch = kind.launch
        else:
            launch = kind.launch.resized(tiles.grid, **arguments.sizes(call)._asdict())
        scratch = None
        if tiles.is_split:
            sizes_of_scratch = tiles.part_elements(call.head_dim_v), tiles.num_programs
            scratch = ScratchOf(*sizes_of_scratch, self.device)
        return kind, launch, scratch


class LaunchKind:
    """What all launches share that differ in sizes and grid only. `launch` is that of the call for
    which the object was made.
    """

    def __init__(self, call: AttentionCall, tiles: Tiles, target: Target, skips: bool) -> None:
        formats = formats_of(call, target, tiles.is_paired)
        out, lse = call.new_results()
        pointers = arguments.pointers(call, formats, target, (out, lse), (None, None), None)
        self._out_shape, self._num_heads = out.shape[1:], call.num_heads
        self._out_dtype, self._device = out.dtype, call.q.device
        self._stored = [x if x is None else x.dtype for x in pointers]
        made = ["parts", "counters", "seen_tiles"]
        self.pick = _picker(list(call.given_tensors()), made, pointers)
        self._strides = arguments.strides(call, pointers)
        self._scalars = arguments.scalars(call, formats, tiles)
        self._options = arguments.options(call, formats, tiles, target)._replace(SKIPS=skips)
        self._of_compiler = arguments.compiler_options(tiles, target)
        self.launch = Launch(
            _attention_fwd_kernel,
            tiles.grid,
            strides=self._strides,
            scalars=self._scalars,
            **arguments.sizes(call)._asdict(),
            OPTIONS=self._options,
            **dependent_launch(target.overlaps_launches),
            **self._of_compiler,
        )

    def results(self, total_q: int) -> tuple[Allocation, Allocation]:
        """Allocations of `out` and `softmax_lse` for total_q queries."""
        return (
            Allocation((total_q, *self._out_shape), self._out_dtype, self._device),
            Allocation((self._num_heads, total_q), torch.float32, self._device),
        )

    def pointers(self, tensors: tuple[Any, ...]) -> groups.Pointers:
        """The kernel's pointers, picked from the plan's tensors and viewed in its dtypes."""
        picked = zip(self.pick(tensors), self._stored, strict=True)
        views = [x if t is None or t == x.dtype else x.view(t) for x, t in picked]
        return groups.Pointers(*views)

    def launch_in_graph(
        self, pointers: groups.Pointers, grid: tuple[int, ...], sizes: groups.Sizes
    ) -> None:
        """Add the launch to the graph that is being traced."""
        lengths = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "k_start", "q_position")
        copies = only_read(*(getattr(pointers, name) for name in lengths))
        pointers = pointers._replace(**dict(zip(lengths, copies, strict=True)))
        node = node_arguments(pointers, self._strides, sizes, self._scalars, self._options)
        Launch(_graph_attention_fwd_kernel, grid, **node, **self._of_compiler)()


def _plan_map_of(call: AttentionCall) -> Callable[[tuple[Any, ...]], Tensor]:
    """A function that makes the map of a mask, of the plan's tensors."""
    make, names = plan_map(call), list(call.given_tensors())
    pick = operator.itemgetter(names.index("attn_bias"), names.index("cu_seqlens_q"))
    return lambda tensors: make(*pick(tensors))


def _picker(
    given: list[str], made: list[str], pointers: groups.Pointers
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that makes the kernel's pointers of a tuple: the tensors `given`, out, lse, the
    workspace `made` for the launch, and None.
    """
    names = [*given, "out", "lse", *made, None]
    sources = [
        groups.ARGUMENTS.get(name, name) if name in made or x is not None else None
        for name, x in pointers._asdict().items()
    ]
    return operator.itemgetter(*map(names.index, sources))
