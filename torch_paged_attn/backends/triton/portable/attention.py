"""From a checked call to a launch: what `flash_varlen` and `blocksparse` share on the host.

Nothing here reads a tensor: grids, splits and workspaces follow from shapes.
"""

import torch
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
    allocate,
    following,
    is_traced,
    launch,
    only_read,
)
from torch_paged_attn.backends.triton.runtime.target import target_of
from torch_paged_attn.backends.triton.runtime.workspace import zeroed_counters
from torch_paged_attn.backends.triton.tuning import Config


def attend(
    call: AttentionCall,
    *,
    config: Config | None = None,
    splits: SplitPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel. `config` and `splits` override what shapes and tables say."""
    results = call.new_results()
    if call.total_q == 0:
        return results
    target, device = target_of(call.q.device), call.q.device
    traits = traits_of(call, target)
    tiles = choose_tiles(traits, call.total_q, call.batch, key_bound(call), config, splits)
    formats = formats_of(call, target, tiles.is_paired)
    parts = counters = None
    if tiles.is_split:
        parts = allocate((tiles.part_elements(call.head_dim_v),), torch.float32, device)
        counters = zeroed_counters(device, tiles.num_programs)

    pointers = arguments.pointers(call, formats, target, results, (parts, counters))
    strides = arguments.strides(call, pointers)
    sizes = arguments.sizes(call)
    scalars = arguments.scalars(call, formats, tiles)
    options = arguments.options(call, formats, tiles, target)
    told = arguments.compiler_options(tiles, target)
    if is_traced():
        lengths = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
        copies = only_read(*(getattr(pointers, name) for name in lengths))
        pointers = pointers._replace(**dict(zip(lengths, copies, strict=True)))
        node = node_arguments(pointers, strides, sizes, scalars, options)
        launch(_graph_attention_fwd_kernel, tiles.grid, **node, **told)
    else:
        launch(
            _attention_fwd_kernel,
            tiles.grid,
            pointers,
            strides=strides,
            scalars=scalars,
            **sizes._asdict(),
            OPTIONS=options,
            **following(target.overlaps_launches),
            **told,
        )
    return results
