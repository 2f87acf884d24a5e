"""The calls that are compiled for chips that are not here.

They are the named problems, those of `MORE`, the backward of those that have one and of `BACKWARD`,
and every kind of cache write, merge and look-up of slots.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from dispatched import dispatched
from undrawn import build_undrawn

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton import Triton
from torch_paged_attn.backward_call import arguments as backward_arguments
from torch_paged_attn.testing import (
    EXTENDED,
    EXTENDED_DIFFERENTIABLE,
    PROBLEMS,
    SELECTED,
    SELECTED_DIFFERENTIABLE,
    Layout,
    Problem,
    Selected,
)
from torch_paged_attn.testing.training_problems import DIFFERENTIABLE

FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
EIGHT_BITS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}

# what the names of backward's calls begin with
BACKWARDS = "backward/"

bf16, f32 = torch.bfloat16, torch.float32
PREFILL = ((200, 72), (130, 0))
DECODE = ((1, 500), (1, 90))
SOME, MANY = ((1, 2500), *[(1, 9)] * 19), [(1, 5)] * 520
LONG = ((1, 5000), *[(1, 9)] * 5)
# under a bool mask, programs enough that each has whole tiles, for which a map is made
MASKED = ((300, 0),) * 4
# several queries a sequence, as for tokens that were guessed: more than 16 rows for a KV head
GUESSED, MANY_GUESSED = ((8, 2500), *[(8, 9)] * 39), [(8, 5)] * 520

OF_INT8 = {"dtype": bf16, "kv_dtype": torch.int8, "descale": "heads"}
OF_TOKENS = OF_INT8 | {"descale": "tokens"}

# the hint of the longest sequence's keys
SAID = {
    "d128/said_few_near/bf16": 512,
    "d128/said_few/bf16": 4096,
    "d128/said_few_once/bf16": 16384,
    "d128/said_several_near/bf16": 512,
    "d128/said_several_once/bf16": 2048,
    "d128/said_several/bf16": 8192,
    "d128/said_some_next/bf16": 512,
    "d128/said_some_near/bf16": 1024,
    "d128/said_some_mid/bf16": 4096,
    "d128/said_some/bf16": 8192,
    "d128/said_wave_next/bf16": 512,
    "d128/said_wave_mid/bf16": 1024,
    "d128/said_wave/bf16": 8192,
    "d128/said_several_once/kv_int8": 2048,
    "d128/said_several/kv_int8": 8192,
    "d64/said_several_near/bf16": 512,
    "d64/said_several/bf16": 4096,
    "d64/said_few_near/bf16": 512,
    "d64/said_some/bf16": 512,
    "d64/said_wave/bf16": 512,
    "d64/said_several/kv_int8": 4096,
}

# what the named problems leave out of the sizes and options that choose a kernel's tiles
MORE = {
    p.name: p
    for p in (
        Problem("d128/prefill_wide_pages/bf16", PREFILL, 8, 2, 128, dtype=bf16, page_size=128),
        # pages of sizes that are not compiled in, shorter and longer than a tile's keys
        *(
            Problem(f"{name}_{size}/bf16", seqs, 8, 2, dim, dtype=bf16, page_size=page)
            for size, page in (("short_pages", 17), ("long_pages", 544))
            for name, seqs, dim in (
                ("d64/prefill", PREFILL, 64),
                ("d128/prefill", PREFILL, 128),
                ("d256/prefill", PREFILL, 256),
                ("d128/decode", DECODE, 128),
            )
        ),
        Problem("d128/prefill_short_pages/f32", PREFILL, 8, 2, 128, dtype=f32, page_size=17),
        Problem("d128/decode_short_pages/kv_int8", DECODE, 8, 2, 128, page_size=17, **OF_INT8),
        Problem("d128/prefill_full/bf16", PREFILL, 8, 2, 128, dtype=bf16, causal=False),
        Problem("d128/prefill_bias/bf16", PREFILL, 8, 2, 128, dtype=bf16, bias="float"),
        Problem("d128/prefill_mask/bf16", MASKED, 64, 8, 128, dtype=bf16, bias="bool"),
        Problem("d192/prefill_mask/bf16", MASKED, 64, 64, 192, 128, dtype=bf16, bias="bool"),
        Problem("d128/prefill_alibi/bf16", PREFILL, 8, 2, 128, dtype=bf16, alibi="heads"),
        Problem("d128/prefill_dropout/bf16", PREFILL, 8, 2, 128, dtype=bf16, dropout_p=0.1),
        Problem(
            "d128/prefill_layout/bf16", PREFILL, 8, 2, 128, dtype=bf16, layout=Layout(heads="kv")
        ),
        Problem("d256/prefill/bf16", PREFILL, 8, 2, 256, dtype=bf16, page_size=16),
        Problem("d256/prefill/f32", PREFILL, 8, 2, 256, dtype=f32, page_size=16),
        Problem("d256/decode/bf16", DECODE, 8, 2, 256, dtype=bf16, page_size=16),
        Problem("d64/decode/bf16", DECODE, 8, 2, 64, dtype=bf16, page_size=16),
        Problem("d64/prefill_bias/bf16", PREFILL, 8, 2, 64, dtype=bf16, bias="float"),
        Problem("d256/prefill_softcap/bf16", PREFILL, 8, 2, 256, dtype=bf16, softcap=30.0),
        Problem("d256/latent/bf16", PREFILL, 1, 1, 256, dtype=bf16, page_size=256, latent=True),
        Problem("d512/decode/f32", DECODE, 8, 2, 512, dtype=f32, page_size=16),
        Problem("d128/decode_packed/bf16", DECODE, 8, 2, 128, dtype=bf16),
        Problem("d128/decode_few_medium/bf16", ((1, 3000),), 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/decode_few_long/bf16", ((1, 5000),), 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/decode_some_narrow/bf16", SOME, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/decode_some_wide/bf16", SOME, 8, 2, 128, dtype=bf16, page_size=64),
        Problem("d128/decode_many/bf16", tuple(MANY), 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_few_near/bf16", DECODE, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_few/bf16", ((1, 3000),), 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_few_once/bf16", ((1, 9000),), 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_several_near/bf16", SOME[:6], 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_several_once/bf16", SOME[:6], 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_several/bf16", LONG, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_some_next/bf16", SOME, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_some_near/bf16", SOME, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_some_mid/bf16", SOME, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_some/bf16", (*LONG, *SOME), 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_wave_next/bf16", SOME * 2, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_wave_mid/bf16", SOME * 2, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_wave/bf16", (*LONG, *SOME * 2), 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_several_once/kv_int8", SOME[:6], 8, 2, 128, page_size=16, **OF_INT8),
        Problem("d128/said_several/kv_int8", LONG, 8, 2, 128, page_size=16, **OF_INT8),
        # of bits that depend on a sequence alone, without a list of tiles
        Problem(
            "d128/decode_invariant/bf16",
            LONG,
            8,
            2,
            128,
            dtype=bf16,
            page_size=16,
            batch_invariant=True,
        ),
        Problem("d64/said_several_near/bf16", SOME[:6], 8, 2, 64, dtype=bf16, page_size=16),
        Problem("d64/said_several/bf16", SOME[:6], 8, 2, 64, dtype=bf16, page_size=16),
        Problem("d64/said_few_near/bf16", DECODE, 8, 2, 64, dtype=bf16, page_size=16),
        Problem("d64/said_several/kv_int8", SOME[:6], 8, 2, 64, page_size=16, **OF_INT8),
        Problem("d64/said_wave/bf16", SOME * 2, 8, 2, 64, dtype=bf16, page_size=16),
        Problem("d64/said_some/bf16", SOME[1:], 8, 2, 64, dtype=bf16, page_size=16),
        Problem("d64/decode_many/bf16", tuple(MANY), 8, 2, 64, dtype=bf16, page_size=16),
        Problem("d64/decode/kv_int8", tuple(MANY), 8, 2, 64, page_size=16, **OF_INT8),
        Problem("d64/decode_several/kv_int8", SOME[:6], 8, 2, 64, page_size=16, **OF_INT8),
        Problem("d64/decode_few/kv_int8", DECODE, 8, 2, 64, page_size=16, **OF_INT8),
        Problem("d128/decode_few/kv_int8", DECODE, 8, 2, 128, page_size=16, **OF_INT8),
        Problem("d128/decode_many/kv_int8", tuple(MANY), 8, 2, 128, page_size=16, **OF_INT8),
        Problem("d128/decode_many/tokens_int8", tuple(MANY), 8, 2, 128, page_size=16, **OF_TOKENS),
        Problem(
            "d128/decode_many/tokens_int4",
            tuple(MANY),
            8,
            2,
            128,
            page_size=16,
            cache_layout="rows",
            **OF_TOKENS | {"kv_dtype": torch.uint8},
        ),
        Problem("d128/guessed_narrow/bf16", GUESSED, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/guessed_wide/bf16", GUESSED, 8, 2, 128, dtype=bf16, page_size=64),
        Problem("d128/guessed_few/bf16", GUESSED[:20], 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/guessed_short/bf16", GUESSED[1:], 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/guessed_few_short/bf16", GUESSED[1:21], 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d256/guessed_few/bf16", GUESSED[:2], 4, 2, 256, dtype=bf16, page_size=16),
        Problem("d256/guessed_several/bf16", GUESSED[:8], 4, 2, 256, dtype=bf16, page_size=16),
        Problem("d128/guessed_many/bf16", tuple(MANY_GUESSED), 8, 2, 128, dtype=bf16, page_size=16),
        Problem(
            "d128/guessed/kv_int8",
            GUESSED,
            8,
            2,
            128,
            dtype=bf16,
            page_size=16,
            kv_dtype=torch.int8,
            descale="heads",
        ),
        # scales by token, on Hopper in its kernel
        *(
            Problem(
                f"{name}/tokens_{stored}",
                seqs,
                8,
                2,
                dim,
                page_size=16,
                **OF_TOKENS | {"kv_dtype": kv_dtype},
            )
            for stored, kv_dtype in (EIGHT_BITS | {"int4": torch.uint8}).items()
            for name, seqs, dim in (
                ("d128/guessed", GUESSED, 128),
                ("d128/mixed", (*PREFILL, *SOME), 128),
                ("d64/mixed", (*PREFILL, *SOME), 64),
            )
            if dim == 128 or stored != "e5m2"
        ),
        # few keys are the portable kernel's, on Hopper too
        Problem(
            "mla/decode/bf16",
            ((1, 600), (2, 64), (1, 0)),
            16,
            1,
            576,
            512,
            dtype=bf16,
            page_size=64,
            cache_layout="mla",
        ),
        Problem(
            "mla/prefill/bf16",
            PREFILL,
            16,
            1,
            576,
            512,
            dtype=bf16,
            page_size=64,
            cache_layout="mla",
        ),
        # latents with scales by column, as rows of 656 bytes
        *(
            Problem(
                f"mla/{name}_columns/{dtype}",
                seqs,
                8 if name.endswith("h8") else 16,
                1,
                64,
                512,
                dtype=FLOATS[dtype],
                v_dtype=torch.float8_e4m3fn,
                page_size=64,
                cache_layout="rows",
                latent=True,
                descale="columns",
            )
            for name, seqs, dtype in (
                ("decode", ((1, 600), (1, 64), (1, 0)), "bf16"),
                ("decode_h8", ((1, 600), (1, 64), (1, 0)), "bf16"),
                ("prefill", PREFILL, "bf16"),
                ("prefill", PREFILL, "f16"),
            )
        ),
        *(
            Problem(
                f"d128/decode/kv_{name}",
                SOME,
                8,
                2,
                128,
                dtype=bf16,
                page_size=16,
                kv_dtype=dtype,
                descale="heads",
            )
            for name, dtype in EIGHT_BITS.items()
        ),
    )
}

# options that no kernel of a backward has more of
EVERYTHING = {
    "bias": "float",
    "bias_heads": "all",
    "softcap": 5.0,
    "alibi": "heads",
    "dropout_p": 0.1,
    "window_size_left": 50,
    "sinks": True,
}

# the sizes and options that choose a backward's tiles
BACKWARD = {
    p.name: p
    for p in (
        *(
            Problem(f"d{d}/{kind}/{name}", PREFILL, 4, 2, d, head_dim_v, dtype=dtype, **options)
            for d, head_dim_v in ((64, 64), (128, 128), (256, 256), (576, 512))
            for name, dtype in (("bf16", bf16), ("f32", f32))
            for kind, options in (
                ("causal", {}),
                ("full", {"causal": False}),
                ("everything", EVERYTHING),
                ("one_bias", EVERYTHING | {"bias_heads": "one"}),
            )
        ),
        *(
            Problem(f"d{d}/mask/bf16", PREFILL, 4, 2, d, 128, dtype=bf16, bias="bool")
            for d in (128, 192)
        ),
        Problem("d128/layout/f16", PREFILL, 8, 2, 128, dtype=torch.float16, layout=Layout()),
    )
}


def attention(problem: Problem) -> Callable[[], None]:
    from torch_paged_attn.backends.triton import BACKEND

    call = build_undrawn(problem)
    said = {"max_seqlen_k": SAID[problem.name]} if problem.name in SAID else {}
    args, options = dispatched(call.op, call.args | said)
    return functools.partial(BACKEND.function(call.op), *args, **options)


def _backward(problem: Problem) -> Callable[[], None]:
    """The backward of a problem's call, whose values do not matter."""
    from torch_paged_attn.backends.triton import BACKEND

    call = build_undrawn(problem)
    args, options = dispatched(call.op, call.args)
    forward = getattr(AttentionCall, call.op)(*args, **options)
    out, lse = forward.new_results()
    given = forward.given() | {"dout": out, "dlse": lse, "out": out, "softmax_lse": lse}
    op = f"{call.op}_backward"
    listed = backward_arguments(op)
    args = [given[x.name] for x in listed if not x.keyword_only]
    options = {x.name: given[x.name] for x in listed if x.keyword_only and x.name in given}
    return functools.partial(BACKEND.function(op), *args, **options)


def _cache_write(source: torch.dtype, stored: torch.dtype) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.reshape_and_cache import reshape_and_cache

    new = torch.zeros(9, 8, 128, dtype=source)
    cache = torch.zeros(2, 4, 8, 16, 128).to(stored)
    scale = torch.ones(8) if stored.itemsize == 1 else None
    slots = torch.arange(9)
    return lambda: reshape_and_cache(new, new, cache, slots, scale, scale)


def _quantize(source: torch.dtype, stored: torch.dtype) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.reshape_and_cache import reshape_and_cache_quantize

    new, slots = torch.zeros(40, 8, 128, dtype=source), torch.arange(40)
    width = 64 if stored == torch.uint8 else 128
    caches = [torch.zeros(4, 8, 16, width).to(stored) for _ in "kv"]
    scales = [torch.ones(4, 8, 16) for _ in "kv"]
    return lambda: reshape_and_cache_quantize(new, new, *caches, *scales, slots)


def _merge(dtype: torch.dtype) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.merges.merge_states import merge_states

    out, lse = torch.zeros(9, 8, 128, dtype=dtype), torch.zeros(8, 9)
    return lambda: merge_states(out, lse, out, lse)


def _merge_list(dtype: torch.dtype) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.merges.merge_states import merge_states_list

    out, lse = torch.zeros(9, 8, 128, dtype=dtype), torch.zeros(8, 9)
    return lambda: merge_states_list([out] * 3, [lse] * 3)


def _merge_remote(dtype: torch.dtype) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.merges.merge_remote import Slots, merge_remote

    out, lse, numbers = torch.zeros(9, 8, 128), torch.zeros(8, 9), torch.zeros(9, dtype=torch.int32)
    slots = [torch.zeros(Slots.of(4, 18, 128).elements)] * 4
    flags = [torch.zeros(Slots.of(4, 18, 128).flags, dtype=torch.int32)] * 4
    options = {"rank": 1, "out_dtype": dtype, "seconds": 1.0}
    return lambda: merge_remote(out, lse, numbers, numbers, slots, flags, **options)


def _merge_backward(dtype: torch.dtype) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.merges.merge_states_backward import merge_states_backward

    out, lse = torch.zeros(9, 8, 128, dtype=dtype), torch.zeros(8, 9)
    return lambda: merge_states_backward(out, lse, out, lse, out, lse, out, lse)


def _append_slots(bounds: list[int] | None) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.append_slots import append_slots

    seqlens, table = torch.zeros(9, dtype=torch.int32), torch.zeros(9, 4, dtype=torch.int32)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    return lambda: append_slots(seqlens, table, cu_seqlens, 16, 18)


def _append_and_attend(
    stored: torch.dtype, is_ragged: bool = False, is_interleaved: bool | None = None, each: int = 1
) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.append_and_attend import append_and_attend

    q, new = torch.zeros(40, 1, 8, 128, dtype=bf16), torch.zeros(40, each, 2, 128, dtype=bf16)
    cache, table = torch.zeros(80, 16, 2, 128).to(stored), torch.zeros(40, 4, dtype=torch.int32)
    scales = [torch.ones(2) if stored.itemsize == 1 else None] * 2
    bounds = [None, None]
    if is_ragged:
        q, new = q[:, 0], new.flatten(0, 1)
        bounds = [torch.zeros(41, dtype=torch.int32)] * 2
    has_rotary = is_interleaved is not None
    cos = torch.zeros(64, 64, dtype=bf16 if is_ragged else f32) if has_rotary else None
    options = {"rotary_interleaved": is_interleaved} if has_rotary else {}
    given = q, cache, cache, new, new, table[:, 0], table, None, *scales, *bounds, cos, cos
    return lambda: append_and_attend(*given, causal=True, **options)


def _select_keys(
    dtype: torch.dtype, heads: int, groups: int, pages: bool, **options: Any
) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.select_keys import select_keys

    q, weights = torch.zeros(40, heads, 128, dtype=dtype), torch.zeros(40, heads)
    cu_seqlens, used = torch.tensor([[0, 40], [0, 700]], dtype=torch.int32), None
    k, table = torch.zeros(700, groups, 128, dtype=dtype), None
    if pages:
        k, used = k[:640].view(10, 64, groups, 128).transpose(1, 2), cu_seqlens[1, 1:]
        table = torch.zeros(1, 10, dtype=torch.int32)
    lengths = (None, 40, 0, used, table) if pages else (cu_seqlens[1], 40, 0)
    return lambda: select_keys(q, k, weights, cu_seqlens[0], *lengths, **options)


# heads as models have them
MORE_SELECTED = {
    p.name: p
    for p in (
        Problem(
            "selected/dsa_128_heads/bf16",
            ((2, 600),),
            128,
            1,
            576,
            512,
            dtype=bf16,
            page_size=64,
            cache_layout="mla",
            selected=Selected(512),
        ),
        Problem(
            "selected/m3_64_heads/bf16",
            ((2, 900),),
            64,
            4,
            128,
            dtype=bf16,
            page_size=128,
            selected=Selected(6, 128, "kv"),
        ),
        # each unit is named by many tokens
        Problem(
            "selected/m3_prefill/bf16",
            ((700, 300),),
            64,
            4,
            128,
            dtype=bf16,
            page_size=128,
            selected=Selected(3, 128, "kv", own=True),
        ),
        Problem(
            "selected/packed_prefill/f16",
            ((900, 300), (100, 0)),
            64,
            4,
            64,
            dtype=torch.float16,
            selected=Selected(3, 64, "kv", own=True),
        ),
    )
}

# lists of packed keys, of whose gradients parts are left: by single keys, and by units
SELECTED_TRAINING = {
    p.name: p
    for p in (
        Problem(
            f"selected/{name}/{'f16' if dtype == torch.float16 else 'bf16'}",
            ((100, 300),),
            heads,
            kv_heads,
            dim,
            dim_v,
            dtype=dtype,
            selected=selected,
        )
        for name, heads, kv_heads, dim, dim_v, selected, dtype in (
            ("single_keys", 32, 1, 128, None, Selected(64), bf16),
            ("single_latents", 16, 1, 576, 512, Selected(64), bf16),
            ("m3_training", 64, 4, 128, None, Selected(3, 128, "kv", own=True), bf16),
            ("m3_training", 64, 4, 128, None, Selected(3, 128, "kv", own=True), torch.float16),
            ("groups_of_4", 16, 4, 128, None, Selected(3, 128, "kv", own=True), bf16),
        )
    )
}


def _calls() -> dict[str, Callable[[], Callable[[], None]]]:
    lacked = set(Triton().lacks)
    everything = PROBLEMS | MORE | EXTENDED | SELECTED | MORE_SELECTED
    problems = {name: p for name, p in everything.items() if p.optional.isdisjoint(lacked)}
    calls = {name: functools.partial(attention, problems[name]) for name in problems}
    backwards = DIFFERENTIABLE | BACKWARD | EXTENDED_DIFFERENTIABLE | SELECTED_DIFFERENTIABLE
    backwards = backwards | SELECTED_TRAINING
    calls |= {
        f"{BACKWARDS}{name}": functools.partial(_backward, backwards[name]) for name in backwards
    }
    for name, dtype in FLOATS.items():
        calls[f"merge_states_backward/{name}"] = functools.partial(_merge_backward, dtype)
        calls[f"merge_states/{name}"] = functools.partial(_merge, dtype)
        calls[f"merge_states/list/{name}"] = functools.partial(_merge_list, dtype)
        calls[f"merge_remote/{name}"] = functools.partial(_merge_remote, dtype)
        for stored_name, stored in {name: dtype, **EIGHT_BITS}.items():
            write = functools.partial(_cache_write, dtype, stored)
            calls[f"reshape_and_cache/{name}_to_{stored_name}"] = write
    for stored_name, stored in {"int4": torch.uint8, **EIGHT_BITS}.items():
        write = functools.partial(_quantize, bf16, stored)
        calls[f"reshape_and_cache/quantize_bf16_to_{stored_name}"] = write
    calls["append_slots/equal"] = functools.partial(_append_slots, None)
    for name, stored in {"bf16": bf16, "int8": torch.int8}.items():
        calls[f"append_and_attend/{name}"] = functools.partial(_append_and_attend, stored)
        rotary = functools.partial(_append_and_attend, stored, False, name == "bf16")
        calls[f"append_and_attend/rotary_{name}"] = rotary
    ragged = functools.partial(_append_and_attend, torch.float8_e4m3fn, True, False, 30)
    calls["append_and_attend/rotary_ragged_many_e4m3"] = ragged
    for name, options in {
        "dsa/bf16": dict(dtype=bf16, heads=64, groups=1, pages=False, num_units=512),
        "blocks/f32": dict(
            dtype=f32, heads=8, groups=2, pages=True, num_units=4, select_size=64, pool="mean",
            force_last=1,
        ),
    }.items():  # fmt: skip
        calls[f"select_keys/{name}"] = functools.partial(_select_keys, **options)
    calls["append_slots/ragged"] = functools.partial(_append_slots, list(range(0, 20, 2)))
    return calls


CALLS = _calls()

# calls of which the bits of a row do not depend on the others
INVARIANT = {n for n, problem in (PROBLEMS | MORE | EXTENDED).items() if problem.batch_invariant}
