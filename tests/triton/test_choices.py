"""Which form and which tiles of Hopper's kernel a call takes, and how many heads share a tile."""

import dataclasses

import pytest
import torch
from hopper_calls import HAS_HOPPER, HOPPER, hopper_call

from torch_paged_attn.backends.triton import flash_varlen
from torch_paged_attn.backends.triton.dispatch import kernels
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.forward import choices, tiles
from torch_paged_attn.backends.triton.hopper.forward import plan as hopper
from torch_paged_attn.backends.triton.hopper.forward.shared_memory import fit_stages
from torch_paged_attn.backends.triton.runtime.target import assume
from torch_paged_attn.testing import Problem, assert_accurate, build

bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    "seqs, options, longest, kernels",
    [
        (((128, 0),) * 512, dict(num_kv_heads=4), 128, "hopper"),
        (((40, 0),) * 512, dict(num_kv_heads=4), 40, "portable"),  # few rows in a tile
        (((40, 0),) * 512, dict(num_heads=8, head_dim=128), 40, "hopper"),  # which heads fill
        (((50, 0),) * 9, dict(num_heads=8, head_dim=128), 50, "portable"),  # few tiles
        (((480, 0),) * 4, dict(num_heads=12, num_kv_heads=12), 480, "hopper"),  # longer sequences
    ],
)
def test_short_sequences(seqs, options, longest, kernels):
    problem = Problem("short", seqs, dtype=bf16, causal=False, **options)
    with assume(HOPPER):
        call = hopper_call(problem)
        choice = flash_varlen.choose(call, longest)
        assert choice.kernel == kernels and longest in (choice.in_turns, choice.form.longest)
        others = [flash_varlen.choose(call, other) for other in (0, 600)]
        paged = hopper_call(dataclasses.replace(problem, seqs=seqs[:5], page_size=16))
        for choice in (*others, flash_varlen.choose(paged, longest)):
            assert choice.in_turns == choice.form.longest == 0


@pytest.mark.parametrize("options", [dict(num_heads=8, head_dim=128), dict(num_heads=12)])
def test_few_short_sequences(options):
    """A list of few tiles, of one consumer each."""
    problem = Problem("few", ((300, 0), (80, 0)) * 3, dtype=bf16, causal=False, **options)
    form = choices.Form(tiles="low")
    with assume(HOPPER):
        call = hopper_call(problem)
        assert flash_varlen.choose(call, 300) == flash_varlen.Choice("hopper", None, form)
        assert choices.choose_tiles(call, form)[0].CONSUMERS == 1
        assert flash_varlen.choose(call, 600).form == choices.Form()
    if HAS_HOPPER:
        call = hopper_call(problem, "cuda")
        assert_accurate(*hopper.attend(call, form=form), build(problem).truth())


def chunks(seqs, heads=(32, 8, 128), page_size=16, reach=0, **options):
    """A call of chunks of prompts whose table has room for 131,072 keys."""
    problem = Problem("chunks", seqs, *heads, dtype=bf16, page_size=page_size, **options)
    table = torch.zeros(len(seqs), 2**17 // page_size, dtype=torch.int32)
    return hopper_call(problem, block_table=table, max_seqlen_k=reach)


@pytest.mark.parametrize(
    "seqs, heads, options, reach, expected",
    [
        # few rows over few keys: no list, and small pieces of work
        (((70, 900),), (32, 8, 64), {}, 1024, ("numbered", "divided")),
        # many keys: cut
        (((70, 1000),), (16, 8, 256), {}, 1280, ("cut", "low")),
        (((70, 7000),), (32, 8, 128), {}, 8192, ("cut", "divided")),
        # a window hides most of the keys
        (((900, 900),), (32, 8, 128), dict(window_size_left=127), 2048, ("numbered", "small")),
        # many rows, whose tiles share keys
        (((1775, 2000),) * 4, (32, 8, 128), {}, 4096, ("numbered", "tall")),
    ],
)
def test_chunks(seqs, heads, options, reach, expected):
    with assume(HOPPER):
        call = chunks(seqs, heads, reach=reach, **options)
        choice = flash_varlen.choose(call)
    assert choice.kernel == "hopper" and choice.way.name == " ".join(expected)
    assert (choice.form.is_numbered, choice.form.is_cut) == (
        expected[0] == "numbered",
        expected[0] == "cut",
    )


@pytest.mark.parametrize("page_size, kv_dtype", [(16, None), (1, None), (16, e4m3)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_every_way_has_tiles_that_fit(head_dim, page_size, kv_dtype):
    """Of all ways that a call may have, whatever is estimated."""
    with assume(HOPPER):
        call = chunks(((300, 600),), (8, 2, head_dim), page_size, 1024, kv_dtype=kv_dtype)
        ranking = kernels.ranking(call, 0, support.unsupported(call))
        possible = [name for name, x in ranking.items() if not isinstance(x, str)]
        for name in possible:
            if (form := kernels.named(name).form) is not None:
                config, heads = choices.choose_tiles(call, form)
                options = tiles.options_of(call, config, heads, form)
                assert fit_stages(options, 2, call.k.itemsize).KV_STAGES >= 1
                assert options.IS_NUMBERED is name.startswith("numbered")
                assert (options.MOST_PARTS > 0) is name.startswith(("cut", "dealt"))


@pytest.mark.parametrize(
    "queries, heads, reach, is_sorted",
    [
        (1008, (32, 32, 128), 2048, True),
        (1008, (32, 32, 128), 4096, False),  # its keys do not stay in the cache
        (1008, (32, 8, 128), 4096, True),
        (243, (40, 8, 128), 512, True),
        (1008, (32, 32, 128), 0, False),  # without hints
        (4000, (32, 8, 128), 2048, False),  # many tiles
    ],
)
def test_order_of_tiles(queries, heads, reach, is_sorted):
    with assume(HOPPER):
        call = chunks(((queries, 90),), heads, reach=reach)
        form = choices.Form(is_numbered=True, tiles="tall")
        config, packed = choices.choose_tiles(call, form)
        options = tiles.options_of(call, config, packed, form)
        heads_at_once = tiles.sizes_of(call, options, 0, packed).heads_per_unit * packed
        assert heads_at_once == (call.num_heads if is_sorted else call.group_size)


def test_stages_of_divided_keys_are_even():
    """A stage that both consumers waited for in turns would be passed by who is ahead."""
    with assume(HOPPER):
        for page_size, width in ((1, 64), (1, 128), (16, 64), (16, 128)):
            call = chunks(((90, 400),), (8, 2, width), page_size=page_size, reach=512)
            form = choices.Form(is_numbered=True, tiles="divided")
            config, packed = choices.choose_tiles(call, form)
            options = tiles.options_of(call, config, packed, form)
            assert config.SPLITS_KEYS and options.KV_STAGES % options.CONSUMERS == 0
            assert options.ROW_GROUPS == 1 and options.CONSUMERS == 2
            fitted = fit_stages(options._replace(KV_STAGES=8), 2, 2)
            assert fitted.KV_STAGES < 8 and fitted.KV_STAGES % 2 == 0  # there is no room for more


@pytest.mark.parametrize("group, tokens", [(5, 12), (7, 9), (3, 21), (6, 10), (8, 8)])
def test_tokens_of_a_group_fill_a_tile(group, tokens):
    """Boxes of so many tokens and heads; what Triton compiles for has 64 rows."""
    with assume(HOPPER):
        call = chunks(((90, 90),), (4 * group, 4, 128), reach=512)
        config, packed = choices.choose_tiles(call, choices.Form(tiles="low"))
        options = tiles.options_of(call, config, packed)
        assert (packed, options.TOKENS) == (group, tokens)
        boxes = tiles.boxes_of(call, call.new_results()[0], options)
    for box in (boxes[0], boxes[3]):
        tensor_map = box.at(16)
        filled = getattr(tensor_map, "filled", tuple(tensor_map.block_shape))
        assert filled == (1, 1, tokens, group, 128)
        assert torch.Size(tensor_map.block_shape).numel() == 64 * 128


def test_heads_of_any_width_are_batch_invariant():
    for dim in (64, 96, 128, 256):
        problem = Problem(
            "wide", ((1, 300), (130, 0)), 8, 2, dim, dtype=bf16, page_size=16, batch_invariant=True
        )
        with assume(HOPPER):
            assert flash_varlen.choose(hopper_call(problem)).kernel == "hopper"
            for heads in (6, 10, 12, 14):
                call = hopper_call(dataclasses.replace(problem, num_heads=heads))
                assert flash_varlen.choose(call).kernel == "hopper"


@pytest.mark.parametrize(
    "hints, is_packed, said",
    [
        ((5, 900), False, 5),
        ((65, 900), False, 0),
        ((5, 7), True, 7),
        ((130, 90), True, 192),
        ((90, 512), True, 512),
        ((90, 513), True, 0),
        ((torch.tensor(5), 5), True, 0),
    ],
)
def test_hint_of_the_longest_sequence(hints, is_packed, said):
    assert flash_varlen.said_of_longest(*hints, is_packed) == said


@pytest.mark.parametrize(
    "keys, is_packed, said",
    [
        (7, False, 64),
        (450, False, 512),
        (512, False, 512),
        (513, False, 640),
        (900, False, 1024),
        (1024, False, 1024),
        (1025, False, 1280),
        (10**6, False, 131072),
        (0, False, 0),
        (900, True, 0),
        (torch.tensor(900), False, 0),
    ],
)
def test_hint_of_its_keys(keys, is_packed, said):
    assert flash_varlen.said_of_reach(keys, is_packed) == said


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.uint8, e4m3])
@pytest.mark.parametrize("queries", [1, 5, 8, 16])
def test_drafts_with_scales_by_token(kv_dtype, queries):
    """Of few queries, converting keys takes longer than products: the portable kernel's tiles have
    fewer rows, and more programs convert at a time."""
    # a block table says how many keys there may be
    call = chunks(((queries, 9),) * 16, kv_dtype=kv_dtype, descale="tokens")
    with assume(HOPPER):
        kernel = "portable" if queries <= 8 else "hopper"
        assert flash_varlen.choose(call, queries).kernel == kernel
        by_head = chunks(((queries, 9),) * 16, kv_dtype=e4m3, descale="heads")
        assert queries == 1 or flash_varlen.choose(by_head, queries).kernel == "hopper"
        # those of many queries are copied first
        call = chunks(((512, 9),) * 4, kv_dtype=kv_dtype, descale="tokens")
        assert flash_varlen.choose(call).kernel == "hopper and portable"


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.uint8, e4m3])
def test_a_chunk_beside_decodes_with_scales_by_token(kv_dtype):
    """Keys of the decodes are not converted for tiles of 128 rows; of few keys they are, since
    three launches take longer."""
    seqs = ((1, 9),) * 31 + ((512, 9),)
    for reach, kernel in ((9472, "hopper and portable"), (640, "hopper")):
        with assume(HOPPER):
            call = chunks(seqs, reach=reach, kv_dtype=kv_dtype, descale="tokens")
            assert flash_varlen.choose(call).kernel == kernel, reach
