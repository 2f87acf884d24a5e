"""`append_and_attend` on GPUs, in two launches: the first (`append_kernel.py`) writes new tokens
and lengths, and rotates keys and queries; the second is attention.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import numbers_of
from torch_paged_attn.backends.triton.attend_cache import ranges
from torch_paged_attn.backends.triton.cache_write.append_kernel import (
    HeadStrides,
    Pointers,
    Rotary,
    Strides,
    append_kernel,
    claim_kernel,
)
from torch_paged_attn.backends.triton.cache_write.written_slots import CLAIMED, FEW_TOKENS, width_of
from torch_paged_attn.backends.triton.common.dequant import as_stored, stored_format
from torch_paged_attn.backends.triton.flash_varlen import (
    HINTS,
    MOST_HINTS,
    flash_varlen,
    said_of_longest,
)
from torch_paged_attn.backends.triton.reshape_and_cache import choose_rows, row_strides
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import Target, cdiv, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation, Constants
from torch_paged_attn.ops.append_and_attend import OP, Parts, check, check_rows, parts_of
from torch_paged_attn.ops.repeated import Recent

# the operator's tensors
TENSORS = (
    "q", "k_cache", "v_cache", "key", "value", "cache_seqlens", "block_table", "sinks", "k_descale",
    "v_descale", "cu_seqlens_q", "cu_seqlens_k_new", "rotary_cos", "rotary_sin",
)  # fmt: skip
# those that `parts_of` and `check` take
SHAPED = (
    "q", "k_cache", "v_cache", "key", "value", "cache_seqlens", "cu_seqlens_q", "cu_seqlens_k_new",
)  # fmt: skip
CHECKED = (
    "cache_seqlens", "block_table", "sinks", "k_descale", "v_descale", "rotary_cos", "rotary_sin",
)  # fmt: skip
# those of `flash_varlen` behind queries and caches
ATTENTION = "seqused_k", "block_table", "sinks", "k_descale", "v_descale"


class AppendAndAttend:
    """The operator, called with the arguments of `ops.append_and_attend`."""

    def __call__(
        self, *tensors: Tensor | None, max_seqlen_q: int = 0, **options: Any
    ) -> tuple[Tensor, Tensor]:
        key, plan = _kind_of(max_seqlen_q)
        return launch_cache.call(key, plan, tensors, options)

    def recent(self) -> Recent:
        """Where the plans of its last calls are."""
        return launch_cache.recent(_kind_of, HINTS[:1])


# with the arguments of `ops.append_and_attend`
append_and_attend = AppendAndAttend()


@functools.lru_cache(MOST_HINTS)
def _kind_of(max_seqlen_q: int) -> tuple[str, Callable[..., Plan]]:
    """As `AttentionOp`'s."""
    longest = said_of_longest(max_seqlen_q, 0, False)
    return f"{OP}, {longest}", functools.partial(_plan, longest)


def _plan(
    longest: int, *tensors: Tensor | None, rotary_interleaved: bool = True, **options: Any
) -> Plan:
    found: dict[str, Any] = dict.fromkeys(TENSORS) | dict(zip(TENSORS, tensors, strict=False))
    given = [name for name in TENSORS if found[name] is not None]
    parts = parts_of(*map(found.__getitem__, SHAPED))
    if found["cu_seqlens_q"] is None:
        longest = said_of_longest(parts.q.shape[0] // max(parts.batch, 1), 0, False)
    # what is not given: how many numbers, and their step
    made: dict[str, tuple[int, int]] = {}
    if found["block_table"] is None:
        check_rows(parts)
        made["block_table"] = parts.batch, 1
    constants = Constants(functools.partial(ranges, made, parts.q.device), parts.q.device)
    found |= zip(made, constants()[0], strict=True)
    check(parts, *map(found.__getitem__, CHECKED), **options)

    target, has_rotary = target_of(parts.q.device), found["rotary_cos"] is not None
    launches, new = _launches_of(parts, found, rotary_interleaved, options, target)
    if found["q"].dim() == 4:
        shape = *found["q"].shape[:3], numbers_of(parts.v_cache)
        new["out"] = Allocation(shape, parts.q.dtype, parts.q.device)
        options = options | {"out": new["out"]().flatten(0, 1)}
    names = [*given, *made, *new, None]
    stored = parts.k_cache.dtype.itemsize == 1
    unused = () if stored else ("k_descale", "v_descale")
    wanted = (x if x in names and x not in unused else None for x in Pointers._fields)
    pick = operator.itemgetter(*map(names.index, wanted))
    rows = "turned" if has_rotary else "q"
    bounds = "bounds" if found["cu_seqlens_q"] is None else "cu_seqlens_q"
    attention = rows, "k_cache", "v_cache", bounds, *ATTENTION, "out"
    pick_attention = operator.itemgetter(*(names.index(x) for x in attention if x in names))
    q = torch.empty_like(parts.q, memory_format=torch.contiguous_format) if has_rotary else parts.q
    attend = flash_varlen.plan(
        longest, 0, q, parts.k_cache, parts.v_cache, parts.cu_seqlens_q, None, parts.seqused_k,
        found["block_table"], None, None, found["sinks"], None, found["k_descale"],
        found["v_descale"], **options,
    )  # fmt: skip
    allocations = list(new.values())

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        constant, at_constant = constants() if made else ((), ())
        own = [allocate() for allocate in allocations]
        every = (*tensors, *constant, *own, None)
        at = (*addresses, *at_constant, *[x.data_ptr() for x in own], None)
        for launch in launches:
            if launch.is_ready:
                launch.start(pick(at))
            else:
                views = [x if x is None else as_stored(x, target)[0] for x in pick(every)]
                launch(Pointers(*views))
        return attend(pick_attention(every), pick_attention(at))

    return run


def _launches_of(
    parts: Parts,
    found: dict[str, Any],
    is_interleaved: bool,
    options: dict[str, Any],
    target: Target,
) -> tuple[list[Launch], dict[str, Allocation]]:
    """The launch that writes new tokens, with many of them one before it that notes which of them
    write, and what both need besides the operator's tensors.
    """
    num_tokens, batch = parts.key.shape[0], parts.batch
    num_queries, num_heads, dim = parts.q.shape
    cos, sin, device = found["rotary_cos"], found["rotary_sin"], parts.q.device
    new = {"seqused_k": Allocation((batch,), torch.int32, device)}
    if found["cu_seqlens_q"] is None:
        new["bounds"] = Allocation((batch + 1,), torch.int32, device)
    is_dependent = dependent_launch(target.overlaps_launches)
    stored = parts.k_cache.dtype.itemsize == 1
    scales = (found["k_descale"], found["v_descale"]) if stored else (None, None)
    (_, columns), rows = choose_rows(parts.key, parts.value, parts.k_cache, num_tokens, target)
    rows = rows._replace(WIDTH=width_of(num_tokens))
    blocks = num_blocks = cdiv(max(num_tokens, batch), rows.BLOCK_T)
    rotary = Rotary(0)
    if cos is not None:
        new["turned"] = Allocation.like(parts.q)
        is_still = not options.get("causal") and max(
            options.get("window_size_left", -1), options.get("window_size_right", -1)
        ) < 0  # fmt: skip
        table_format = stored_format(cos.dtype, target)
        rotary = Rotary(cos.shape[1], is_interleaved, is_still, table_format, num_heads)
        blocks += cdiv(num_queries, rows.BLOCK_T)
        columns = max(columns, cdiv(num_heads * dim, rows.BLOCK_E))
    strides = Strides(
        k=row_strides(parts.key, parts.k_cache, scales[0]),
        v=row_strides(parts.value, parts.v_cache, scales[1]),
        q=HeadStrides(*parts.q.stride()[:2]),
        cache_seqlens=found["cache_seqlens"].stride(0),
        page=found["block_table"].stride(1),
        cu_seqlens_k_new=_stride(found["cu_seqlens_k_new"]),
        cu_seqlens_q=_stride(found["cu_seqlens_q"]),
        cos=_stride(cos),
        sin=_stride(sin),
    )
    sizes = {
        "page_size": parts.k_cache.shape[2],
        "batch": batch,
        "num_tokens": num_tokens,
        "num_slots": parts.k_cache.shape[0] * parts.k_cache.shape[2],
        "stride_row": found["block_table"].stride(0),
        "max_pages": found["block_table"].shape[1],
    }
    launches = []
    if num_tokens > FEW_TOKENS:
        new["claims"] = Allocation((sizes["num_slots"],), torch.int32, device)
        grid = (cdiv(num_tokens, CLAIMED),)
        launches.append(
            Launch(claim_kernel, grid, strides=strides, **sizes, BLOCK=CLAIMED, **is_dependent)
        )
    append = Launch(
        append_kernel,
        (blocks, columns),
        strides=strides,
        num_heads=parts.key.shape[1],
        **sizes,
        num_queries=num_queries,
        num_positions=0 if cos is None else cos.shape[0],
        num_blocks=num_blocks,
        OPTIONS=rows,
        ROTARY=rotary,
        **is_dependent,
    )
    return [*launches, append], new


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)
