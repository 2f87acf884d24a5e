"""The attention kernel in graphs of torch.compile.

A kernel in a graph takes tensors and numbers one by one instead of tuples. Inductor prints it with
constants that Python can parse, so a group of constants is passed as pairs of a name and a value.
Graphs have static sizes (with dynamic sizes an op is one opaque node), so integers can be constants
as well. Floats are not, because the compiler would round some of them differently.
"""

from typing import Any

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.portable.common.groups import (
    Options,
    Pointers,
    Scalars,
    Sizes,
    Strides,
)
from torch_paged_attn.backends.triton.portable.common.named import named, named_constants
from torch_paged_attn.backends.triton.portable.forward.kernel import attend_batch


@triton.jit
def _graph_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, parts_ptr, counters_ptr, cu_seqlens_q_ptr,
    cu_seqlens_k_ptr, seqused_k_ptr, block_table_ptr, crow_ptr, col_ptr, bias_ptr, alibi_ptr,
    sinks_ptr, q_descale_ptr, k_descale_ptr, v_descale_ptr, out_scale_ptr, rng_ptr, q_latent_ptr,
    tail_mask_ptr, k_start_ptr, q_position_ptr, seen_tiles_ptr,
    scale, factor, softcap, dropout_scale,
    STRIDES: tl.constexpr, SIZES: tl.constexpr, SCALARS: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    GROUPED: tl.constexpr = named_constants(OPTIONS)
    numbers: tl.constexpr = named_constants(SCALARS)
    pointers = named(
        "q k v out lse parts counters cu_seqlens_q cu_seqlens_k seqused_k block_table crow col bias"
        " alibi sinks q_descale k_descale v_descale out_scale rng q_latent tail_mask k_start"
        " q_position seen_tiles"
    )(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, parts_ptr, counters_ptr, cu_seqlens_q_ptr,
        cu_seqlens_k_ptr, seqused_k_ptr, block_table_ptr, crow_ptr, col_ptr, bias_ptr, alibi_ptr,
        sinks_ptr, q_descale_ptr, k_descale_ptr, v_descale_ptr, out_scale_ptr, rng_ptr,
        q_latent_ptr, tail_mask_ptr, k_start_ptr, q_position_ptr, seen_tiles_ptr,
    )  # fmt: skip
    # Inductor passes Python floats as float64
    if softcap is not None:
        softcap = tl.cast(softcap, tl.float32)
    if dropout_scale is not None:
        dropout_scale = tl.cast(dropout_scale, tl.float32)
    scalars = named(
        "scale factor softcap left right dropout_threshold dropout_scale num_heads key_rank"
        " min_units page_size"
    )(
        tl.cast(scale, tl.float32), tl.cast(factor, tl.float32), softcap, numbers.left,
        numbers.right, numbers.dropout_threshold, dropout_scale, numbers.num_heads,
        numbers.key_rank, numbers.min_units, numbers.page_size,
    )  # fmt: skip
    attend_batch(pointers, named_constants(STRIDES), named_constants(SIZES), scalars, GROUPED)


def node_arguments(
    pointers: Pointers, strides: Strides, sizes: Sizes, scalars: Scalars, options: Options
) -> dict[str, Any]:
    """The arguments of `_graph_attention_fwd_kernel` by name."""
    numbers = scalars._asdict()
    floats = {name: numbers.pop(name) for name in ("scale", "factor", "softcap", "dropout_scale")}
    constants = {"STRIDES": strides._asdict(), "SIZES": sizes._asdict(), "SCALARS": numbers}
    constants["OPTIONS"] = options._asdict()
    return (
        {f"{name}_ptr": x for name, x in pointers._asdict().items()}
        | floats
        | {name: tuple(values.items()) for name, values in constants.items()}
    )
