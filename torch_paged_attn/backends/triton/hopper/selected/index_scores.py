"""Scores of index queries on index keys on Hopper, for `select_keys`."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.selected import index_arguments
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import cdiv, target_of

# queries, token by head, of a tile; heads of a group, and widths, that the kernel has tiles for
COLUMNS, GROUPS, WIDTHS = 128, (16, 32, 64, 128), (64, 128)
CONSUMERS, Q_STAGES, KEY_STAGES, REGISTERS = 3, 2, 8, 160
# tiles of tokens of a sequence, on average, from which on they are filled well enough
LEAST_TILES = 4


def unsupported(call: AttentionCall) -> str | None:
    """Why a call cannot take this kernel; None if it can."""
    q, k = call.q, call.k
    if (reason := support.unsupported_device(q.device)) is not None:
        return reason
    if q.dtype not in support.IN_16_BITS or k.dtype != q.dtype:
        return f"q is {q.dtype} and k {k.dtype}"
    if call.q_descale is not None or call.k_descale is not None:
        return "it has no q_descale and k_descale"
    if call.group_size not in GROUPS or call.head_dim not in WIDTHS:
        return f"{call.group_size} heads of {call.head_dim} for each head of keys"
    if call.is_paged:
        size = call.page_size
        if size % index_arguments.KEYS and (
            index_arguments.KEYS % size or size < support.LEAST_BOX
        ):
            return f"page_size is {size}"
        if k.stride(2) <= 0 or k.stride(0) % k.stride(2):
            return "pages do not lie a whole number of slots apart"
    if any(support.is_misaligned(x, x.dim() - 1) for x in (q, k)):
        return "q or k is not aligned to 16 bytes"
    return None


def unprofitable(call: AttentionCall) -> str | None:
    """Why a call that can take this kernel should not; None if it should."""
    if call.total_q < LEAST_TILES * call.batch * (COLUMNS // call.group_size):
        return "a sequence has few tokens"
    return None


def options_of(call: AttentionCall, is_relu: bool) -> index_arguments.IndexOptions:
    return index_arguments.IndexOptions(
        WIDTH=call.head_dim,
        GROUP_SIZE=call.group_size,
        GROUPS=call.num_kv_heads,
        TOKENS=COLUMNS // call.group_size,
        PAGE_SIZE=call.page_size if call.is_paged else 0,
        BOX_ROWS=min(index_arguments.KEYS, call.page_size)
        if call.is_paged
        else index_arguments.KEYS,
        HAS_RIGHT=call.causal,
        IS_RELU=is_relu,
        CONSUMERS=CONSUMERS,
        Q_STAGES=Q_STAGES,
        KEY_STAGES=KEY_STAGES,
        REGISTERS=REGISTERS,
    )


def plan_scores(
    call: AttentionCall, rows: slice, is_relu: bool, num_keys: int
) -> Callable[[dict[str, Tensor], Tensor | None, Tensor], None]:
    """A function that writes the scores `(rows, G, num_keys)` of some rows of calls like this one,
    for which `unsupported` has no reason. It takes the tensors by their names, weights in float32,
    contiguous, and the tensor for scores.
    """
    from torch_paged_attn.backends.triton.hopper.common.tma import ragged_rows
    from torch_paged_attn.backends.triton.hopper.selected.index_kernel import (
        _hopper_index_scores_kernel,
    )

    options, table, k = options_of(call, is_relu), call.block_table, call.k
    pieces = cdiv(rows.stop - rows.start, options.TOKENS) * options.GROUPS
    pieces *= cdiv(num_keys, index_arguments.CHUNK)
    sizes = index_arguments.IndexSizes(
        first_row=rows.start,
        stop_row=rows.stop,
        num_keys=num_keys,
        batch=call.batch,
        num_rows=k.shape[0],
        max_pages=0 if table is None else table.shape[1],
        stride_table=0 if table is None else table.stride(0),
        page_rows=k.stride(0) // k.stride(2) if call.is_paged else 0,
    )
    of_keys: dict[str, Any] = {"rows": options.BOX_ROWS, "heads": 1, "width": options.WIDTH}
    q_boxes = ragged_rows(call.q, options.TOKENS, options.GROUP_SIZE, options.WIDTH)
    k_boxes = ragged_rows(k[0].transpose(0, 1) if call.is_paged else k, **of_keys)
    launch = Launch(
        _hopper_index_scores_kernel,
        (min(pieces, target_of(call.q.device).multiprocessors),),
        **sizes._asdict(),
        OPTIONS=options,
        num_warps=4,
    )

    def start(found: dict[str, Tensor], weights: Tensor | None, scores: Tensor) -> None:
        named = {name: found.get(name) for name in index_arguments.IndexPointers._fields}
        pointers = index_arguments.IndexPointers(**named | {"weights": weights, "scores": scores})
        launch(q_boxes.at(found["q"].data_ptr()), k_boxes.at(found["k"].data_ptr()), pointers)

    return start
