"""The host's side of the portable backward: it plans a checked call and launches its kernels.

    seen tiles      of a bool mask                          `seen_tiles.py`
    statistics      lse and D of each row                   `backward_preprocess.py`
    dK, dV          a tile of keys, in a loop over queries  `dkdv.py`
    dQ              a tile of queries, in a loop over keys; and the
                    gradient of a bias with all heads       `dq.py`
    dbias           of a bias with one head, in a loop over heads  `dbias.py`

These are seven matrix products, where a single kernel would need five. But each sum is computed by
one program in one order, so that the same call gives the same bits, and the only workspace are the
statistics. Kernels of gradients that are not wanted are not launched.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.backward_preprocess import plan_statistics
from torch_paged_attn.backends.triton.common.seqlen_info import key_bound, num_tiles
from torch_paged_attn.backends.triton.common.transposed_lists import TransposedLists
from torch_paged_attn.backends.triton.portable.backward import arguments as backward_arguments
from torch_paged_attn.backends.triton.portable.backward.dbias import _attention_dbias_kernel
from torch_paged_attn.backends.triton.portable.backward.dkdv import _attention_dkdv_kernel
from torch_paged_attn.backends.triton.portable.backward.dq import _attention_dq_kernel
from torch_paged_attn.backends.triton.portable.common.formats import formats_of
from torch_paged_attn.backends.triton.portable.common.gather_scatter import chunks
from torch_paged_attn.backends.triton.portable.common.seen_tiles import has_map, plan_map
from torch_paged_attn.backends.triton.portable.forward import arguments
from torch_paged_attn.backends.triton.portable.forward.tiles import Tiles, Traits, traits_of
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.backends.triton.tuning import BackwardConfig, Config, choose_backward_config
from torch_paged_attn.backward_call import BackwardCall, tensor_names

# rows of the smallest tile
FEWEST_ROWS = 16


def lacks_room(call: AttentionCall) -> str | None:
    """Why the smallest tiles do not fit into shared memory; None if they do. In float32, rows of
    keys, values, queries and their gradients have to fit.
    """
    if call.q.dtype != torch.float32:
        return None
    room = target_of(call.q.device).shared_memory
    columns = sum(sum(chunks(dim, FEWEST_ROWS)) for dim in (call.head_dim, call.head_dim_v))
    if room is None or 2 * FEWEST_ROWS * 4 * columns + 1024 <= room:
        return None
    return f"is float32 with heads of {call.head_dim} and {call.head_dim_v} numbers"


def _gap(has_layout: bool) -> int:
    """How many tile numbers are reserved for partial tiles per sequence (`seqlen_info.py`)."""
    return 2 if has_layout else 1


def _position_bound(call: AttentionCall) -> int:
    """The largest position that a key can have, plus one."""
    last, run = key_bound(call) - 1, call.key_interleave
    return max((last // run * call.key_ranks + call.key_rank) * run + last % run + 1, 0)


def _tiles(config: Config, grid: tuple[int, ...], has_layout: bool) -> Tiles:
    """Tiles of one head, each of which belongs to one program."""
    return Tiles(
        config=config,
        pack=1,
        tokens=config.BLOCK_M,
        block_n=config.BLOCK_N,
        gap=_gap(has_layout),
        is_paired=False,
        grid=grid,
        is_split=False,
        min_units=1,
        fixed_units=0,
        search_width=1,
        is_one_look=True,
    )


def _special(call: AttentionCall, traits: Traits) -> str:
    """What is special about a call, for `choose_backward_config`."""
    # these need registers, as the options do that are not plain
    needs_more = call.tail_mask is not None or call.q_position is not None
    if traits.is_plain and not needs_more:
        return "/full" if traits.is_full else ""
    others = call.alibi_slopes is not None, call.layout is not None, call.softcap, call.dropout_p
    has_mask = call.attn_bias is not None and call.attn_bias.dtype == torch.bool
    return "/mask" if has_mask and not needs_more and not any(others) else "/extra"


class _Kernels:
    def __init__(self, call: BackwardCall, config: BackwardConfig | None) -> None:
        forward = call.forward
        self.call, self.target = call, target_of(forward.q.device)
        self.formats = formats_of(forward, self.target, False)
        self.traits = traits = traits_of(forward, self.target)
        config = config or choose_backward_config(
            self.target.arch, traits.head_dim, traits.itemsize, _special(forward, traits)
        )
        self.config = BackwardConfig(*map(self._within, (config.dkdv, config.dq, config.dbias)))

    def _within(self, config: Config) -> Config:
        """`config` with tiles that are no larger than a block of the layout, if there is one."""
        if not self.traits.k_block:
            return config
        m = min(config.BLOCK_M, self.traits.q_block)
        return dataclasses.replace(
            config, BLOCK_M=m, BLOCK_N=min(config.BLOCK_N, self.traits.k_block)
        )

    def _launch(self, kernel: Any, config: Config, grid: tuple[int, ...], **more: int) -> Launch:
        forward, target = self.call.forward, self.target
        tiles = _tiles(config, grid, self.traits.k_block > 0)
        keys_stay = kernel is _attention_dkdv_kernel
        return Launch(
            kernel,
            grid,
            strides=backward_arguments.strides(self.call),
            **arguments.sizes(forward)._asdict(),
            **more,
            scalars=arguments.scalars(forward, self.formats, tiles),
            OPTIONS=backward_arguments.options(
                forward, self.formats, tiles, target, keys_stay=keys_stay
            ),
            **dependent_launch(target.overlaps_launches),
            **arguments.compiler_options(tiles, target),
        )

    def _query_tiles(self, config: Config) -> int:
        forward, gap = self.call.forward, _gap(self.traits.k_block > 0)
        return num_tiles(forward.total_q, forward.batch, config.BLOCK_M, gap)

    def dkdv(self) -> Launch:
        """The launch of the kernel of dK and dV."""
        forward, config = self.call.forward, self.config.dkdv
        total_k = forward.k.shape[0]
        tiles = num_tiles(total_k, forward.batch, config.BLOCK_N, 1)
        if backward_arguments.shares_keys(forward):
            tiles = -(-total_k // config.BLOCK_N)
        grid = tiles, forward.num_kv_heads
        return self._launch(_attention_dkdv_kernel, config, grid, total_k=total_k)

    def dq(self, *, is_beside: bool) -> Launch:
        """The launch of the kernel of dQ, and of dbias for a bias with all heads. `is_beside`: it
        may run at the same time as the kernel of dK and dV, which was launched just before.
        """
        config = self.config.dq
        grid = self._query_tiles(config), self.call.forward.num_heads
        return self._launch(_attention_dq_kernel, config, grid, IS_BESIDE=is_beside)

    def dbias(self, width: int) -> Launch:
        """The launch of the kernel of dbias for a bias with one head and `width` keys."""
        config = self.config.dbias
        grid = self._query_tiles(config), -(-width // config.BLOCK_N)
        return self._launch(_attention_dbias_kernel, config, grid)


def differentiate(
    call: BackwardCall, *, config: BackwardConfig | None = None
) -> tuple[Tensor, ...]:
    """Plan the call and launch its kernels; return dq, dk, dv, dbias and dsinks."""
    given = tuple(x for x in call.tensors().values() if x is not None)
    return plan_backward(call, config=config)(given, None)


def plan_backward(call: BackwardCall, *, config: BackwardConfig | None = None) -> Plan:
    """A plan for calls like this one. It takes the given tensors in the order of the op's list.
    `config` replaces the tiles that would be chosen.
    """
    # kernels need contiguous rows of dout
    is_copied = call.dout.stride(2) != 1 or 0 in call.dout.stride()
    if is_copied:
        call = dataclasses.replace(call, dout=call.dout.contiguous())
    forward = call.forward
    bias, layout = forward.attn_bias, forward.layout
    results = call.new_results()
    wants_dq, wants_dk, wants_dv, wants_dbias, _ = (x.numel() > 0 for x in results)
    is_shared = wants_dbias and bias is not None and bias.shape[0] < forward.num_heads
    kernels = _Kernels(call, config)
    is_natural = kernels.formats.is_precise or (bias is not None and bias.dtype != torch.bool)
    dkdv = kernels.dkdv() if wants_dk or wants_dv else None
    has_dbias = wants_dbias and not is_shared
    # the kernel only visits listed blocks, so dbias of the others has to be zeroed first
    is_zeroed = has_dbias and layout is not None
    dq = None
    if wants_dq or has_dbias:
        dq = kernels.dq(is_beside=dkdv is not None and not is_zeroed)
    dbias = kernels.dbias(bias.shape[2]) if is_shared and bias is not None else None
    lists_of = None
    if layout is not None and dkdv is not None:
        lists_of = TransposedLists(layout, _position_bound(forward))
    map_of = plan_map(forward) if has_map(forward) else None
    statistics_of = plan_statistics(call, natural=is_natural, lists=lists_of)
    new_results = [Allocation.like(x) for x in results]
    # a kernel also writes results that are not wanted, to spare memory
    spare = [Allocation.like(x) for x in (forward.q, forward.k, forward.v)]
    names = [name for name, x in call.tensors().items() if x is not None]
    nothing = dict.fromkeys(tensor_names(call.op))
    gather = backward_arguments.pointers_of(call, kernels.target)

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, ...]:
        given: dict[str, Any] = nothing | dict(zip(names, tensors, strict=True))
        if is_copied:
            given["dout"] = given["dout"].contiguous()
        listed = None
        if lists_of is not None:
            listed = lists_of.new(given["crow_indices"], given["col_indices"])
        seen = None if map_of is None else map_of(given["attn_bias"], given["cu_seqlens_q"])
        statistics, sink_parts, _ = statistics_of(
            *(given[name] for name in ("dout", "dlse", "out", "softmax_lse", "sinks")),
            given["cu_seqlens_q"],
            layout=listed,
        )
        made = [new() for new in new_results]
        if sink_parts is not None:
            made[4] = sink_parts.sum(1).neg_()
        if dkdv is not None:
            lists: tuple[Tensor | None, ...] = (None, None, None)
            if listed is not None:
                lists = listed.rows, listed.starts, listed.counts
            dk = made[1] if wants_dk else spare[1]()
            dv = made[2] if wants_dv else spare[2]()
            of_keys = {"dk": dk, "dv": dv, "lists": lists}
            dkdv(gather(given, statistics=statistics, seen_tiles=seen, **of_keys))
        if dq is not None:
            of_heads = made[3] if has_dbias else None
            if of_heads is not None and is_zeroed:
                of_heads.zero_()
            first = made[0] if wants_dq else spare[0]()
            of_queries = {"dq": first, "dbias": of_heads}
            dq(gather(given, statistics=statistics, seen_tiles=seen, **of_queries))
        if dbias is not None:
            dbias(gather(given, statistics=statistics, dbias=made[3]))
        return tuple(made)

    return run
