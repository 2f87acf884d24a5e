"""Which calls the Hopper kernel can take, and which it should."""

import importlib.util

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, is_by_token, is_int4
from torch_paged_attn.backends.triton.common.page_sizes import has_rows
from torch_paged_attn.backends.triton.common.seqlen_info import UNBOUNDED, is_bound, key_bound
from torch_paged_attn.backends.triton.common.softmax import LOG2E
from torch_paged_attn.backends.triton.hopper.schedule.block_lists import number_of_entries
from torch_paged_attn.backends.triton.runtime.launch import is_traced
from torch_paged_attn.backends.triton.runtime.launch_cache import kind_of
from torch_paged_attn.backends.triton.runtime.target import next_power_of_2, target_of
from torch_paged_attn.ops.lacking import (
    COLUMN_SCALES,
    INT4,
    OPTIONAL,
    TOKEN_SCALES,
    all_but,
    lacking,
)

# rows of a consumer: the height of a warpgroup's product
BLOCK_M = 64

# keys of the smallest tile, and of the smallest box
LEAST_KEYS, LEAST_BOX = 64, 16

HAS_GLUON = importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper") is not None

# its scale in base two, and one over it, are float32 and neither 0 nor infinite; a larger softcap
# multiplies the error of tanh
LEAST_SCALE, MOST_SOFTCAP = 2.0**-100, 1024.0

# the fewest keys of a sequence whose tiles may be cut into pieces, and pieces of all tiles
LEAST_CUT, PARTS_PER_MULTIPROCESSOR = 2048, 4
# waves of tiles of keys in pages, from which on no tile is cut
MOST_WAVES = 4

# windows of some tiles of keys
SMALL = range(1025)
# bytes of keys and values that stay in the chip's cache while several waves of tiles read them
IN_CACHE = 40 << 20

# tokens of the longest sequence of a batch that is called short, and how many such sequences a grid
# has room for
MOST_SHORT, MOST_SEQUENCES = 512, 65534
# sequences, at most, for which making a list of tiles takes little time
MOST_LISTED = 8

IN_16_BITS = (torch.bfloat16, torch.float16)
IN_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# sizes of pages whose rows are copied
GATHERED = (1, 2, 4, 8)

# mean queries of batches that are mostly chunks of prompts, however many decodes there may be
MOSTLY_CHUNKS = 128

# arguments that the portable kernel supports and this one does not
NOT_CARRIED = ("attn_bias",)
DESCALES = ("q_descale", "k_descale", "v_descale")
# arguments that only kernels with lists of tiles support. A causal mask here assumes that the last
# query is at the position of the last key, so `q_position` is left to the portable kernel
OF_LISTS = ("k_start",)
# callers look at `batch_invariant` themselves, and `_unsupported_types` at the forms of caches
LACKS = all_but(("batch_invariant", *OF_LISTS, *TOKEN_SCALES, *INT4), OPTIONAL)


def unsupported_device(device: torch.device | None = None) -> str | None:
    """Why no call on a device can take this kernel; None if some can."""
    if device is None and not torch.cuda.is_available():
        return "there is no GPU"
    if target_of(device or torch.device("cuda")).arch != "sm90":
        return "this is no Hopper chip"
    return None if HAS_GLUON else "this Triton has no Gluon for Hopper"


def unsupported(call: AttentionCall) -> str | None:
    """Why a call cannot take this kernel; None if it can."""
    if (reason := kind_of(call, _unsupported_kind)) is not None:
        return reason
    if 0 in call.k.shape:
        return "there are no keys"
    if (layout := call.layout) is not None and (
        key_bound(call) > 2**27 or number_of_entries(layout, LEAST_KEYS) >= 2**30
    ):
        return "the blocks of the layout are too many to be numbered in 32 bits"
    return None


def _unsupported_kind(call: AttentionCall) -> str | None:
    """The same for all calls that differ in sizes alone."""
    return unsupported_model(call) or out_of_reach(call)


def unsupported_model(call: AttentionCall) -> str | None:
    """Why no call of a model can take this kernel, wherever its keys are; None if some can."""
    q = call.q
    if (reason := unsupported_device(q.device)) is not None:
        return reason
    # before the types: latents have a dtype of their own
    if (lacked := lacking(call, COLUMN_SCALES)) is not None:
        return f"it has no {lacked}"
    if (reason := _unsupported_types(call)) is not None:
        return reason
    dims = call.head_dim, call.head_dim_v
    if max(dims) > 256 or any(d % 8 for d in dims) or width_of(dims[1]) > width_of(dims[0]):
        return f"head_dim is {dims[0]}, head_dim_v {dims[1]}: not multiples of 8, v's no wider"
    for name in NOT_CARRIED if converts(call) else (*NOT_CARRIED, *_not_beside_16_bits(call)):
        if getattr(call, name) is not None:
            return f"it has no {name}"
    if call.dropout_p > 0.0:
        return "it has no dropout_p"
    if (lacked := lacking(call, LACKS)) is not None:
        return f"it has no {lacked}"
    if not LEAST_SCALE <= call.scale <= 1.0 / LEAST_SCALE:
        return f"softmax_scale is {call.softmax_scale}"
    if call.softcap and not LEAST_SCALE <= call.softcap <= MOST_SOFTCAP:
        return f"softcap is {call.softcap}"
    if call.layout is not None:
        if (lacked := lacking(call, OF_LISTS)) is not None:
            return f"it has no {lacked} beside a layout"
        if is_bound(call.window_size_left) or (call.window_right and is_bound(call.window_right)):
            return "it has no windows beside a layout"
    return None


def out_of_reach(call: AttentionCall) -> str | None:
    """Why this kernel cannot read queries or keys where they are, though it may run other calls of
    the same model; None if it can."""
    q, k, v = call.q, call.k, call.v
    if call.block_table is not None:
        page_size = call.page_size
        if page_size % LEAST_BOX and not (gathers(call) or has_rows(call)):
            return f"page_size is {page_size}, not a multiple of {LEAST_BOX}"
        if any(x.stride(2) <= 0 or x.stride(0) % x.stride(2) for x in (k, v)):
            return "pages do not lie a whole number of slots apart"
    if any(is_misaligned(x, x.dim() - 1) for x in (q, k, v)):
        return "q, k or v is not aligned to 16 bytes"
    return None


def unordered(call: AttentionCall) -> str | None:
    """Why the sums of a call that this kernel can take would be in another order here than in other
    calls of the same sequence; None if they would not."""
    if call.layout is not None:
        return "blocks of a layout do not begin at the same keys for all queries"
    if converts(call):
        return "keys of 8 bits are not summed up in stretches"
    return None


def _unsupported_types(call: AttentionCall) -> str | None:
    q, k, v = call.q, call.k, call.v
    if q.dtype == torch.float8_e4m3fn:
        is_known = k.dtype == v.dtype == q.dtype
    else:
        is_stored = k.dtype in (q.dtype, *IN_8_BITS) or is_int4(k)
        is_known = q.dtype in IN_16_BITS and k.dtype == v.dtype and is_stored
    if not is_known:
        return f"q is {q.dtype}, k {k.dtype} and v {v.dtype}"
    results = (q.dtype,) if converts(call) else (q.dtype, torch.float32)
    is_result = call.result_dtype in (IN_16_BITS if is_float8(call) else results)
    if not is_result:
        return f"q is {q.dtype} and out_dtype {call.result_dtype}"
    is_by = [is_by_token(x, call.batch) for x in (call.k_descale, call.v_descale)]
    has_scales = converts(call) or any(is_by)
    if has_scales and (call.alibi_slopes is not None or call.layout is not None):
        return f"k is {k.dtype} with scales, beside alibi_slopes or a layout"
    if is_int4(k) and not all(is_by):
        return "k is int4, and its scales are not by token"
    if any(is_by) and not (all(is_by) and q.dtype == torch.bfloat16):
        # weights times scales need bfloat16's range
        return f"q is {q.dtype}, and scales by token are of keys {is_by[0]}, of values {is_by[1]}"
    return None


def _not_beside_16_bits(call: AttentionCall) -> tuple[str, ...]:
    """Descales that the kernel does not apply where no keys are converted."""
    is_by = is_by_token(call.k_descale, call.batch) and has_rows(call)
    return ("q_descale",) if is_by and not call.is_batch_invariant else DESCALES


def bytes_of_number(call: AttentionCall) -> float:
    """Bytes of a number of keys and values."""
    return 0.5 if is_int4(call.k) else call.k.itemsize


def is_float8(call: AttentionCall) -> bool:
    return call.q.dtype == torch.float8_e4m3fn


def converts(call: AttentionCall) -> bool:
    """Whether values, which have 8 bits, are converted to 16; and keys, unless `is_float8`."""
    return call.k.itemsize == 1


def unprofitable(call: AttentionCall) -> str | None:
    """Why another kernel, with tiles of few rows or with keys that several programs share, is
    faster for a call that can take this one; None if this one is."""
    if has_low_rows(call):
        rows = mean_length(call) * sharing_heads(call)
        return f"a sequence has {rows} rows for each head of keys"
    tiles = -(-call.total_q * call.num_heads // (2 * BLOCK_M))
    if 2 * tiles < target_of(call.q.device).multiprocessors and not most_parts(call, False):
        return f"{tiles} tiles do not fill the chip"
    return None


def has_low_rows(call: AttentionCall) -> bool:
    """Whether all queries of a sequence of mean length, of all heads that read the same keys, are
    no more than the rows of one consumer."""
    return mean_length(call) * sharing_heads(call) <= BLOCK_M


def reach_of(call: AttentionCall) -> int:
    """The most keys that a sequence of few queries visits, by shapes and hints."""
    reach = min(call.max_seqlen_k or UNBOUNDED, key_bound(call))
    return min(reach, call.window_size_left + BLOCK_M) if is_bound(call.window_size_left) else reach


def is_short(call: AttentionCall, longest: int) -> bool:
    """Whether all sequences of a batch are short, `longest` tokens at most, so that their tiles
    need no list: which program takes which tile follows from shapes.
    """
    if not 0 < longest <= MOST_SHORT or call.block_table is not None or call.layout is not None:
        return False
    if lacking(call, OF_LISTS) is not None:
        return False
    # what was measured: encoders, and of few tiles those of short sequences
    is_full = not is_bound(call.window_size_left) and not is_bound(call.window_right)
    width = width_of(call.head_dim)
    is_measured = is_full and width <= 128 and call.batch <= MOST_SEQUENCES
    return is_measured and (not _are_few(call) or width == 64 or mean_length(call) <= 3 * BLOCK_M)


def is_small(call: AttentionCall) -> bool:
    """Whether a batch of short sequences runs faster with many programs of few rows."""
    length, is_wide = mean_length(call), width_of(call.head_dim) > 64
    is_few = _are_few(call) and length <= (BLOCK_M if is_wide else 2 * BLOCK_M)
    return is_few or (call.group_size == 1 and length <= BLOCK_M)


def are_few_short(call: AttentionCall) -> bool:
    """Whether short sequences are so few that tiles of one consumer, in a list, are faster than
    those that programs take in turns."""
    rows = call.total_q * call.num_heads
    is_one_wave = rows <= 2 * BLOCK_M * target_of(call.q.device).multiprocessors
    return call.batch <= MOST_LISTED and is_one_wave


def has_few_tiles(call: AttentionCall) -> bool:
    """Whether there are so few tiles that their order matters."""
    tiles = call.total_q * call.num_heads // (2 * BLOCK_M)
    return call.layout is None and tiles < MOST_WAVES * target_of(call.q.device).multiprocessors


def is_sorted(call: AttentionCall) -> bool:
    """Whether the longest tiles of all heads come first, and not those of one KV head after those
    of another: few tiles end together then, but its keys are no longer read together."""
    return has_few_tiles(call) and keys_stay(call)


def keys_stay(call: AttentionCall) -> bool:
    """Whether all keys and values stay in the chip's cache, by shapes and hints."""
    of_key = call.num_kv_heads * (call.head_dim + call.head_dim_v) * call.k.itemsize
    sequences = 1 if call.block_table is None else call.batch
    return sequences * reach_of(call) * of_key <= IN_CACHE


def _are_few(call: AttentionCall) -> bool:
    tiles = -(-call.total_q * call.num_heads // (2 * BLOCK_M))
    return tiles < 2 * target_of(call.q.device).multiprocessors


def is_misaligned(x: Tensor, axes: int) -> bool:
    """Whether the accelerator cannot address x: addresses and strides are multiples of 16 bytes."""
    strides = x.stride()[:axes]
    # what is traced has no address yet
    is_off = not is_traced() and x.data_ptr() % 16 != 0
    return is_off or any(s * x.itemsize % 16 or s <= 0 for s in strides)


def width_of(dim: int) -> int:
    """The width of a head of `dim` numbers in shared memory."""
    return max(64, next_power_of_2(dim))


def columns_of(dim: int) -> int:
    """How many columns of a head of `dim` numbers, as wide as `width_of(dim)`, are multiplied: half
    of the width, and a power of two that holds the rest."""
    width = width_of(dim)
    rest = max(16, next_power_of_2(dim - width // 2))
    return width if width == 64 else width // 2 + rest


def scalars_of_scores(call: AttentionCall) -> dict[str, int | float]:
    """The scalars by which kernels make logits of scores, and those of windows, 0 where they hide
    nothing. Scores are q . k or, with a softcap, tanh(softmax_scale * q . k / softcap): logits are
    these times `unit`."""
    slopes, unit = call.alibi_slopes, call.softcap or call.scale
    alibi_strides = (0, 0) if slopes is None else (0, *slopes.stride())[-2:]
    return {
        "stride_alibi_batch": alibi_strides[0],
        "stride_alibi_head": alibi_strides[1],
        "window_left": call.window_size_left if is_bound(call.window_size_left) else 0,
        "window_right": call.window_right if is_bound(call.window_right) else 0,
        "scale_log2": unit * LOG2E.value,
        "softcap_scale_log2": 2 * call.scale / call.softcap * LOG2E.value if call.softcap else 0.0,
        "alibi_scale": 1.0 / unit,
    }


def gathers(call: AttentionCall) -> bool:
    """Whether rows of keys are copied one by one, because pages are smaller than a box."""
    if call.block_table is None or call.layout is not None or call.page_size not in GATHERED:
        return False
    if has_rows(call):
        return False
    if converts(call) and width_of(call.head_dim) > 128:
        return False  # registers spill
    return all(width_of(d) == d for d in (call.head_dim, call.head_dim_v))


def mean_length(call: AttentionCall) -> int:
    return -(-call.total_q // max(call.batch, 1))


def heads_per_layout(call: AttentionCall) -> int:
    if call.layout is None:
        return 1
    return call.num_heads // call.layout.crow_indices.shape[-2]


def sharing_heads(call: AttentionCall) -> int:
    """Query heads that read the same keys."""
    return min(call.group_size, heads_per_layout(call)) if call.layout else call.group_size


def is_few_rows(call: AttentionCall) -> bool:
    """Whether the rows of one consumer hold all queries of a sequence, by sizes: of decodes, or of
    as many guessed tokens each."""
    is_alike = call.total_q == mean_length(call) * call.batch
    return is_alike and mean_length(call) * min(call.group_size, BLOCK_M) <= BLOCK_M


def most_parts(call: AttentionCall, is_uneven: bool) -> int:
    """How many pieces of tiles there may be: none where tiles are many, or see few keys, unless
    they are few or uneven as far as anybody knows."""
    if call.layout is not None:
        return 0
    if call.is_batch_invariant and call.block_table is not None:
        # chunks beside decodes
        is_uneven = is_uneven or mean_length(call) <= MOSTLY_CHUNKS < call.total_q
    keys = key_bound(call)
    multiprocessors = target_of(call.q.device).multiprocessors
    tiles = call.total_q * call.num_heads // (2 * BLOCK_M)
    most_tiles = multiprocessors
    if call.block_table is None:
        keys //= max(call.batch, 1)
    elif width_of(call.head_dim) == width_of(call.head_dim_v):  # else registers spill
        # chunks of prompts: their contexts are long and differ, and the last wave of tiles counts
        most_tiles *= MOST_WAVES
    if not is_uneven and (tiles >= most_tiles or keys < LEAST_CUT):
        return 0
    # a tile more than programs is cut in many, or all wait for it
    is_many = 2 * tiles >= multiprocessors
    return most_room(call) if is_many else PARTS_PER_MULTIPROCESSOR * multiprocessors


def most_room(call: AttentionCall) -> int:
    """The most pieces of tiles that calls of a model are cut in, whatever their sizes are."""
    most = PARTS_PER_MULTIPROCESSOR * target_of(call.q.device).multiprocessors
    return 2 * most if width_of(call.head_dim_v) <= 128 else most
