"""The loop over tiles of keys: scores, the running softmax, and the sum of weighted values."""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.softmax import fold_scores
from torch_paged_attn.backends.triton.portable.common.column_scales import add_group_scores
from torch_paged_attn.backends.triton.portable.common.dropout import dropout_keep
from torch_paged_attn.backends.triton.portable.common.gather_scatter import find_pages
from torch_paged_attn.backends.triton.portable.common.key_positions import (
    block_of_keys,
    key_position,
    tiles_of_block,
)
from torch_paged_attn.backends.triton.portable.common.logits import load_bias, logits, scaled
from torch_paged_attn.backends.triton.portable.common.mask import (
    load_tail,
    tiles_of_phase,
    visible,
    whole_tiles,
)
from torch_paged_attn.backends.triton.portable.common.named import type_of
from torch_paged_attn.backends.triton.portable.common.products import chunk_scores
from torch_paged_attn.backends.triton.portable.common.token_scales import in_units
from torch_paged_attn.backends.triton.portable.forward.load_kv import (
    fold_scaled_values,
    fold_value_tile,
    fold_values_loaded,
    load_keys,
    load_values,
    result_chunks,
    score_keys,
    zero_values,
)


@triton.jit
def has_nan(x):
    """Whether any element is NaN. Triton 3.6 cannot compile two reductions for sm_100."""
    return tl.max((x != x).to(tl.int32)) > 0


@triton.jit
def any_has_nan(tensors):
    """The same of a tuple."""
    found = has_nan(tensors[0])
    for i in tl.static_range(1, len(tensors)):
        found = found | has_nan(tensors[i])
    return found


@triton.jit
def zero_if(is_bad, tensors):
    """The tensors of a tuple, 0 where `is_bad`."""
    found = ()
    for i in tl.static_range(len(tensors)):
        found = found + (tl.where(is_bad, 0.0, tensors[i]),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def tile_of_keys(i, keys, memory, strides, scalars, OPTIONS: tl.constexpr):
    """The first key of tile i, and the end of the keys that count. With a layout, tile i is a part
    of a listed block.
    """
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    if not OPTIONS.HAS_LAYOUT:
        return i * BLOCK_N, keys.stop
    else:
        PER_BLOCK: tl.constexpr = tiles_of_block(
            OPTIONS.K_BLOCK, OPTIONS.KEY_RANKS, OPTIONS.KEY_INTERLEAVE, OPTIONS.BLOCK_N
        )
        column = tl.load(memory.col + (i // PER_BLOCK) * strides.col)
        first, stop = block_of_keys(column, keys, scalars, OPTIONS)
        return first + (i % PER_BLOCK) * BLOCK_N, stop


@triton.jit
def attend_keys(
    rows, queries, keys, memory, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr
):
    """Attention of a tile of queries to the tiles of keys `keys.i_start` to `keys.i_stop` - 1.

    Queries, keys and values are in the chunks of `load_kv.py`. Returns row maxima, row sums, the
    sums of weighted values in chunks, and by what each row's have to be multiplied.
    """
    DTYPE: tl.constexpr = type_of(OPTIONS.DTYPE)
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    BIAS: tl.constexpr = OPTIONS.BIAS
    FIRST_PHASE: tl.constexpr = OPTIONS.FIRST_PHASE
    IS_PRECISE: tl.constexpr = OPTIONS.IS_PRECISE
    # a single query sees exactly the keys from `start` to `stop`
    HAS_LEFT: tl.constexpr = OPTIONS.HAS_LEFT and OPTIONS.TOKENS > 1
    HAS_RIGHT: tl.constexpr = OPTIONS.HAS_RIGHT and OPTIONS.TOKENS > 1
    HAS_LATENT: tl.constexpr = pointers.q_latent is not None
    HAS_TAIL: tl.constexpr = pointers.tail_mask is not None
    HAS_COLUMNS: tl.constexpr = OPTIONS.SCALED_COLUMNS > 0
    # one scale for all numbers of a token's values
    V_BY_TOKEN: tl.constexpr = OPTIONS.V_BY_TOKEN and not HAS_COLUMNS
    # strides count elements, of two bytes if 8-bit ones are paired; those of keys may be those of
    # values, which may begin elsewhere
    K_EACH: tl.constexpr = memory.k.dtype.element_ty.primitive_bitwidth // 8
    V_EACH: tl.constexpr = memory.v.dtype.element_ty.primitive_bitwidth // 8
    V_ALIGNED: tl.constexpr = OPTIONS.V_ALIGNED // V_EACH
    TAKES_V: tl.constexpr = OPTIONS.IS_V_LIKE_K and OPTIONS.V_ALIGNED > OPTIONS.K_ALIGNED
    K_ALIGNED: tl.constexpr = V_ALIGNED if TAKES_V else OPTIONS.K_ALIGNED // K_EACH
    i_start, i_stop, factor = keys.i_start, keys.i_stop, scalars.factor
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_values(OPTIONS)
    units = (tl.full([BLOCK_M], 0.0 if OPTIONS.HAS_UNITS else 1.0, tl.float32),)
    if HAS_COLUMNS:
        units = units * (OPTIONS.HEAD_DIM_V // OPTIONS.SCALED_COLUMNS)

    # phases: 0 tiles at a window's left edge, 1 tiles that every row sees whole, 2 the rest
    i_full, i_tail = whole_tiles(
        i_start, i_stop, keys.full_start, keys.full_stop, BLOCK_N, FIRST_PHASE
    )

    # A key that no query sees may contain NaN, which must not reach the result. A bias may hide
    # such a key in the middle. Checking every value would be slow, so a first attempt does not, and
    # a second attempt with checks follows only if the result contains NaN.
    ATTEMPTS: tl.constexpr = 1 if BIAS == "" else 2
    for attempt in tl.static_range(ATTEMPTS):
        if attempt == 1:
            is_bad = any_has_nan(acc)
            if OPTIONS.HAS_UNITS:
                units = zero_if(is_bad, units)
            m_i = tl.where(is_bad, float("-inf"), m_i)
            l_i = tl.where(is_bad, 0.0, l_i)
            acc = zero_if(is_bad, acc)
            i_full = tl.where(is_bad, i_full, i_start)
            i_tail = tl.where(is_bad, i_tail, i_start)
            i_stop = tl.where(is_bad, i_stop, i_start)
        for phase in tl.static_range(FIRST_PHASE, 3):
            i_first, i_last = tiles_of_phase(phase, i_start, i_full, i_tail, i_stop)
            for i in tl.range(i_first, i_last):
                n0, stop = tile_of_keys(i, keys, memory, strides, scalars, OPTIONS)
                j = n0 + tl.arange(0, BLOCK_N)
                page, slot = find_pages(
                    memory.block_table, n0, keys.start, stop, sizes.num_pages, BLOCK_N,
                    OPTIONS.PAGE_SIZE, phase == 1, OPTIONS.IS_ALIGNED, scalars.page_size,
                )  # fmt: skip

                seen = rows.exists[:, None]
                position, keys_of_tile = rows.position[:, None], j[None, :]
                key_at = key_position(keys_of_tile, scalars, OPTIONS)
                if phase != 1:
                    in_range = (j >= keys.start) & (j < stop)
                    seen = visible(
                        position, key_at, in_range[None, :], scalars.left, scalars.right,
                        HAS_LEFT, HAS_RIGHT,
                    )  # fmt: skip
                    if BIAS != "" or HAS_TAIL:
                        seen = seen & rows.exists[:, None]
                    if HAS_TAIL:
                        seen = seen & load_tail(
                            memory.tail_rows[:, None], rows.exists[:, None], keys_of_tile, keys,
                            strides,
                        )  # fmt: skip

                k_offsets = page * strides.k_page + slot * strides.k_slot
                v_offsets = k_offsets
                if not OPTIONS.IS_V_LIKE_K:
                    v_offsets = page * strides.v_page + slot * strides.v_slot
                if K_ALIGNED > 0:
                    k_offsets = tl.multiple_of(k_offsets, K_ALIGNED)
                if V_ALIGNED > 0 and not OPTIONS.IS_V_LIKE_K:
                    v_offsets = tl.multiple_of(v_offsets, V_ALIGNED)
                if OPTIONS.IS_LOADED_FIRST:
                    loaded = load_keys(memory.k, k_offsets, OPTIONS)
                    values = load_values(memory.v, v_offsets, OPTIONS)
                    s = chunk_scores(
                        (queries.low, queries.high), loaded, OPTIONS.K_HIGH, OPTIONS.CHAIN
                    )
                else:
                    s = score_keys(queries, memory.k, k_offsets, OPTIONS)
                bias = 0.0
                if BIAS != "":
                    # loaded after the product, which would otherwise wait for it
                    bias, allowed = load_bias(
                        memory.bias_rows[:, None], rows.exists[:, None], keys_of_tile, strides,
                        OPTIONS, phase == 1,
                    )  # fmt: skip
                    # rows that do not exist need no mask: they are not written
                    seen = allowed if phase == 1 and attempt == 0 else seen & allowed
                s = scaled(s, queries.scale, queries.raised, OPTIONS)
                if OPTIONS.K_BY_TOKEN:
                    k_scales = page * strides.k_descale_page + slot * strides.k_descale_slot
                    s *= tl.load(memory.k_scales + k_scales)[None, :]
                v_scale = tl.full([], 1.0, tl.float32)
                if OPTIONS.V_BY_TOKEN:
                    v_scales = page * strides.v_descale_page + slot * strides.v_descale_slot
                if V_BY_TOKEN:
                    v_scale = tl.load(memory.v_scales + v_scales)
                if HAS_LATENT:
                    # the loaded values serve as keys here and as values below
                    if not OPTIONS.IS_LOADED_FIRST:
                        values = load_values(memory.v, v_offsets, OPTIONS)
                    if HAS_COLUMNS:
                        s, v_scale = add_group_scores(
                            s, queries.latent, values,
                            1.0 if OPTIONS.RAW_SCORES else queries.latent_scale,
                            memory.v_scales + v_scales, strides.v_descale_column, None, False,
                            OPTIONS,
                        )  # fmt: skip
                    else:
                        more = chunk_scores(queries.latent, values, OPTIONS.V_HIGH, OPTIONS.CHAIN)
                        more = scaled(more, queries.latent_scale, 0.0, OPTIONS)
                        if V_BY_TOKEN:
                            more *= v_scale[None, :]
                        s += more
                s, _ = logits(s, bias, queries.slope, position, key_at, pointers, scalars, OPTIONS)
                if phase != 1 or attempt == 1 or BIAS == "bool":
                    # select instead of adding -inf: a masked key may contain NaN
                    s = tl.where(seen, s, float("-inf"))

                p, m_i, l_i, shrink = fold_scores(
                    m_i, l_i, s, factor, IS_PRECISE, BIAS == "float", OPTIONS.FIXED_UNITS == 0
                )  # fmt: skip
                if pointers.rng is not None:
                    survives = dropout_keep(
                        pointers.rng, scalars.dropout_threshold, rows.b, rows.head, rows.token, n0,
                        BLOCK_N, OPTIONS.IS_ALIGNED, OPTIONS.HAS_DROPOUT_BASE,
                    )  # fmt: skip
                    p = tl.where(survives, p * scalars.dropout_scale, 0.0)

                # a tail mask, too, may hide a key in the middle from all rows
                IS_CAREFUL: tl.constexpr = attempt == 1 or (HAS_TAIL and phase != 1)
                keep = rows.exists
                if IS_CAREFUL:
                    keep = tl.max(seen.to(tl.int32), 0) > 0
                if HAS_COLUMNS:
                    acc, units = fold_scaled_values(
                        acc, units, shrink, p, values, v_scale, keep, OPTIONS, IS_CAREFUL
                    )
                else:
                    if V_BY_TOKEN:
                        if IS_CAREFUL:
                            v_scale = tl.where(keep, v_scale, 0.0)
                        p *= v_scale[None, :]
                        if OPTIONS.HAS_UNITS:
                            p, unit, shrink = in_units(p, units[0], shrink)
                            units = (unit,)
                    p = p.to(DTYPE)
                    if HAS_LATENT or OPTIONS.IS_LOADED_FIRST:
                        acc = fold_values_loaded(acc, shrink, p, values, keep, OPTIONS, IS_CAREFUL)
                    else:
                        acc = fold_value_tile(
                            acc, shrink, p, memory.v, v_offsets, keep, OPTIONS, IS_CAREFUL
                        )
    chunks, gain = result_chunks(acc, units, OPTIONS)
    return m_i, l_i, chunks, gain
