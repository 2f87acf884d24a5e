"""The arguments of the kernels of the backward: those of `forward/arguments.py`, extended."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.dequant import as_stored, stored_format
from torch_paged_attn.backends.triton.common.seqlen_info import is_bound
from torch_paged_attn.backends.triton.portable.common import groups
from torch_paged_attn.backends.triton.portable.common.formats import Formats
from torch_paged_attn.backends.triton.portable.common.gather_scatter import chunks
from torch_paged_attn.backends.triton.portable.forward import arguments
from torch_paged_attn.backends.triton.portable.forward.tiles import Tiles
from torch_paged_attn.backends.triton.runtime.target import Target
from torch_paged_attn.backward_call import BackwardCall


def _extended(name: str, group: Any, *more: str) -> Any:
    return NamedTuple(name, [(field, Any) for field in (*group._fields, *more)])


# `out` and `lse` are None, since the kernels read the statistics instead. The listing_* are those
# of `common/transposed_lists.py`
BackwardPointers: Any = _extended(
    "BackwardPointers",
    groups.Pointers,
    *("dout", "statistics", "dq", "dk", "dv", "dbias"),
    *("listing_rows", "listing_starts", "listing_counts"),
)

BackwardStrides: Any = _extended("BackwardStrides", groups.Strides, "dout_token", "dout_head")

# LAST_PHASE: the last phase of the loop over queries. IS_SHARED: a tile of keys may contain keys of
# several sequences. LAYOUT_HEADS: number of heads of a layout. RELOADS_KEYS: keys and values are
# loaded for each tile of queries again, as registers do not hold them beside their sums
BackwardOptions: Any = _extended(
    "BackwardOptions",
    groups.Options,
    *("LAST_PHASE", "IS_SHARED", "DBIAS_FORMAT", "LAYOUT_HEADS", "LAYOUT_PER_SEQUENCE"),
    "RELOADS_KEYS",
)


# tensors whose dtype the kernels may not support: they are passed in a storage dtype (`dequant.py`)
STORED = ("q", "k", "v", "dout", "dq", "dk", "dv", "dbias")
READ = (
    *("q", "k", "v", "dout", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "crow", "col", "alibi"),
    *("k_start", "q_position"),
)


def pointers_of(call: BackwardCall, target: Target) -> Callable[..., Any]:
    """A function that makes `BackwardPointers` of a call's tensors (by name), of the transposed
    lists, and of results and statistics as keyword arguments.
    """
    bias, has_dropout = call.forward.attn_bias, call.forward.dropout_p > 0.0
    is_mask = bias is not None and bias.dtype == torch.bool
    nothing = dict.fromkeys(BackwardPointers._fields)

    def stored(x: Tensor | None) -> Tensor | None:
        return None if x is None else as_stored(x, target)[0]

    def gather(
        given: dict[str, Tensor | None],
        lists: tuple[Tensor | None, ...] = (None, None, None),
        **made: Tensor | None,
    ) -> Any:
        found = (
            nothing | {name: given.get(groups.ARGUMENTS.get(name, name)) for name in READ} | made
        )
        found |= {name: stored(found[name]) for name in STORED}
        bias = given["attn_bias"]
        found["bias"] = bias.view(torch.uint8) if is_mask and bias is not None else bias
        tail_mask = given["tail_mask"]
        found["tail_mask"] = None if tail_mask is None else tail_mask.view(torch.uint8)
        found["rng"] = given["rng_state"] if has_dropout else None
        found["listing_rows"], found["listing_starts"], found["listing_counts"] = lists
        return BackwardPointers(**found)

    return gather


def shares_keys(call: AttentionCall) -> bool:
    """Whether the tiles of keys are tiles of rows of k, since a row may belong to several sequences
    (k_start), or a tile to several blocks of the layout (key_ranks).
    """
    return call.k_start is not None or (call.layout is not None and call.key_ranks > 1)


def _lacks_registers(call: AttentionCall, target: Target) -> bool:
    """Whether float32 keys and values do not fit into registers beside their sums. A lane of gfx9
    has 512 registers, twice as many as elsewhere."""
    return max(call.head_dim, call.head_dim_v) > 128 and not target.arch.startswith("gfx9")


def strides(call: BackwardCall) -> Any:
    """The forward's strides, and those of dout."""
    forward, dout = call.forward, call.dout
    found = arguments.strides(forward, forward)
    return BackwardStrides(*found, dout_token=dout.stride(0), dout_head=dout.stride(1))


def options(
    call: AttentionCall, formats: Formats, tiles: Tiles, target: Target, *, keys_stay: bool
) -> Any:
    """The compile-time constants of a kernel. `keys_stay`: of the kernel of dK and dV, where a
    program has a tile of keys and loops over queries.
    """
    layout, bias = call.layout, call.attn_bias
    found = arguments.options(call, formats, tiles, target)
    # keys are the rows of some products
    smallest = target.smallest_chunk(max(tiles.config.BLOCK_M, tiles.block_n))
    k_low, k_high = chunks(call.head_dim, smallest)
    v_low, v_high = chunks(call.head_dim_v, smallest)
    # phases of the loop: tiles at one edge of the mask, tiles without a mask, tiles at the other
    # edge
    before, after = is_bound(call.window_size_left), is_bound(call.window_right)
    if keys_stay:
        before, after = after, before
    first, last = (0 if before else 1), (2 if after or not keys_stay else 1)
    is_shared = keys_stay and shares_keys(call)
    if is_shared:
        # a tile may contain only some keys of a sequence
        first = 0
    if layout is not None or bias is not None or call.tail_mask is not None:
        first = last = 2
    found = found._replace(
        K_LOW=k_low, K_HIGH=k_high, V_LOW=v_low, V_HIGH=v_high, FIRST_PHASE=first
    )
    return BackwardOptions(
        **found._asdict(),
        LAST_PHASE=last,
        IS_SHARED=is_shared,
        DBIAS_FORMAT="" if bias is None else stored_format(bias.dtype, target),
        LAYOUT_HEADS=0 if layout is None else layout.crow_indices.shape[-2],
        RELOADS_KEYS=keys_stay and formats.is_precise and _lacks_registers(call, target),
        LAYOUT_PER_SEQUENCE=layout is not None and layout.crow_indices.dim() == 3,
    )
