"""`flash_varlen` on Hopper by tensor memory accelerator and warpgroup products.

What this kernel does not carry goes to the portable one; `unsupported` says why. Heads whose size
is no power of two lie in shared memory beside zeros that the accelerator fills in: the tensors stay
as they are.
"""

import importlib.util

import torch
from torch import Tensor

from torch_paged_attn.backends.triton.launch import is_traced, launch
from torch_paged_attn.backends.triton.softmax import LOG2E
from torch_paged_attn.backends.triton.target import next_power_of_2, target_of
from torch_paged_attn.backends.triton.tile_order import most_tiles, order_tiles
from torch_paged_attn.tuning import HopperConfig, choose_hopper_config

# rows of a consumer: the height of a warpgroup's product
BLOCK_M = 64

HAS_GLUON = importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper") is not None

# windows this wide hide nothing: no sequence is as long
UNBOUNDED = 2**30


def _misaligned(x: Tensor, axes: int) -> bool:
    """Whether the accelerator cannot address x: addresses and strides are multiples of 16 bytes."""
    strides = x.stride()[:axes]
    return x.data_ptr() % 16 != 0 or any(s * x.itemsize % 16 or s <= 0 for s in strides)


def unavailable(device: torch.device | None = None) -> str | None:
    """Why no call on a device can take this kernel; None if some can."""
    if device is None and not torch.cuda.is_available():
        return "there is no GPU"
    if target_of(device or torch.device("cuda")).arch != "sm90":
        return "this is no Hopper chip"
    return None if HAS_GLUON else "this Triton has no Gluon for Hopper"


def unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_scale: Tensor | None = None,
    rng_state: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> str | None:
    """Why a call cannot take this kernel; None if it can."""
    if (reason := unavailable(q.device)) is not None:
        return reason
    if is_traced():
        return "torch.compile does not hold its tensor maps"
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype:
        return f"q is {q.dtype} and k is {k.dtype}, not both bfloat16 or both float16"
    if out_dtype not in (None, q.dtype):
        return f"out_dtype is {out_dtype}"
    if v.shape[-1] != q.shape[-1] or q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"head_dim is {q.shape[-1]} and head_dim_v {v.shape[-1]}, not one multiple of 8"
    options = {
        "attn_bias": attn_bias, "alibi_slopes": alibi_slopes, "sinks": sinks,
        "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale,
        "softcap": softcap or None, "dropout_p": dropout_p or None,
    }  # fmt: skip
    for name, value in options.items():
        if value is not None:
            return f"it has no {name}"
    if softmax_scale is not None and softmax_scale <= 0.0:
        return f"softmax_scale is {softmax_scale}"
    if block_table is not None:
        page_size = k.shape[2]
        if page_size < 16 or page_size & (page_size - 1):
            return f"page_size is {page_size}, not a power of two from 16 on"
        if any(x.stride(2) <= 0 or x.stride(0) % x.stride(2) for x in (k, v)):
            return "pages do not lie a whole number of slots apart"
    if any(_misaligned(x, x.dim() - 1) for x in (q, k, v)) or 0 in k.shape:
        return "q, k or v is not aligned to 16 bytes"
    return None


def _pack(group_size: int, mean_length: int) -> int:
    """Query heads of a group that share a tile: one, unless a sequence would not fill it."""
    pack = 1
    while group_size % (2 * pack) == 0 and pack * mean_length < 2 * BLOCK_M and pack < BLOCK_M:
        pack *= 2
    return pack


def _mean_length(q: Tensor, cu_seqlens_q: Tensor) -> int:
    return -(-q.shape[0] // max(cu_seqlens_q.shape[0] - 1, 1))


def too_small(q: Tensor, k: Tensor, cu_seqlens_q: Tensor) -> str | None:
    """Why a call is better off with tiles of few rows, or with keys that several programs share."""
    group_size = q.shape[1] // k.shape[1]
    rows = _mean_length(q, cu_seqlens_q) * group_size
    if rows <= BLOCK_M:
        return f"a sequence has {rows} rows for each head of keys"
    units = -(-q.shape[0] * q.shape[1] // (2 * BLOCK_M))
    if 2 * units < target_of(q.device).multiprocessors:
        return f"{units} tiles do not fill the chip"
    return None


def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    *_: None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    config: HopperConfig | None = None,
    **__: float | None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel on a call for which `unsupported` has no reason."""
    from torch_paged_attn.backends.triton.hopper_kernel import _hopper_attention_fwd_kernel
    from torch_paged_attn.backends.triton.ragged_rows import ragged_rows

    total_q, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    batch = cu_seqlens_q.shape[0] - 1
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(num_heads, total_q, dtype=torch.float32)
    if total_q == 0:
        return out, lse
    width = max(64, next_power_of_2(head_dim))
    mean_length = _mean_length(q, cu_seqlens_q)
    pack = _pack(num_heads // num_kv_heads, mean_length)
    right = 0 if causal else window_size_right
    if config is None:
        config = choose_hopper_config(width, mean_length, right == 0)
    tokens = config.CONSUMERS * BLOCK_M // pack

    page_size = 0 if block_table is None else k.shape[2]
    key_bound = k.shape[0] if block_table is None else block_table.shape[1] * page_size
    key_rows = min(page_size or config.BLOCK_N, config.BLOCK_N)
    has_left = 0 <= window_size_left < UNBOUNDED
    has_right = 0 <= right < UNBOUNDED
    order = order_tiles(
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        total_q,
        min(key_bound, 2**31 - 1),
        is_paged=page_size > 0,
        is_causal=right == 0,
        tokens=tokens,
        block_n=config.BLOCK_N,
    )
    # (rows, heads, dim), whether the rows are tokens or slots of pages
    k_rows, v_rows = (x if page_size == 0 else x[0].transpose(0, 1) for x in (k, v))
    wave = num_heads // num_kv_heads // pack
    grid = min(
        most_tiles(total_q, batch, tokens) * (num_heads // pack),
        target_of(q.device).multiprocessors,
    )
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    launch(
        _hopper_attention_fwd_kernel,
        (grid,),
        lse,
        order,
        ragged_rows(q, BLOCK_M // pack, pack, width),
        ragged_rows(k_rows, key_rows, 1, width),
        ragged_rows(v_rows, key_rows, 1, width),
        ragged_rows(out, BLOCK_M // pack, pack, width),
        block_table,
        0 if block_table is None else block_table.stride(0),
        k.stride(0) // k.stride(2) if page_size else 0,
        v.stride(0) // v.stride(2) if page_size else 0,
        k.shape[0],
        num_heads,
        total_q,
        window_size_left if has_left else 0,
        right if has_right else 0,
        scale * LOG2E.value,
        wave,
        BLOCK_M=BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        WIDTH=width,
        PACK=pack,
        GROUP_SIZE=num_heads // num_kv_heads,
        PAGE_SIZE=page_size,
        IS_CAUSAL=right == 0,
        HAS_LEFT=has_left,
        HAS_RIGHT=has_right,
        CONSUMERS=config.CONSUMERS,
        STAGES=config.STAGES,
        Q_STAGES=config.Q_STAGES,
        REGISTERS=config.REGISTERS,
        OVERLAP=config.OVERLAP,
        TAKE_TURNS=config.TAKE_TURNS,
        num_warps=4,
    )
    return out, lse
