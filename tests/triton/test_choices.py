"""Which form and which tiles of Hopper's kernel a call takes, and how many heads share a tile."""

import dataclasses

import pytest
import torch
from hopper_calls import HAS_HOPPER, HOPPER, hopper_call

from torch_paged_attn.backends.triton import flash_varlen
from torch_paged_attn.backends.triton.hopper import attention as hopper
from torch_paged_attn.backends.triton.hopper import choices, tiles
from torch_paged_attn.backends.triton.hopper.shared_memory import fit_stages
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
        assert flash_varlen.in_turns(call, longest) == longest
        assert flash_varlen.kernels_of(call, longest)[0] == kernels
        for other in (0, 600):
            assert flash_varlen.in_turns(call, other) == 0
        paged = hopper_call(dataclasses.replace(problem, seqs=seqs[:5], page_size=16))
        assert flash_varlen.in_turns(paged, longest) == 0


@pytest.mark.parametrize("options", [dict(num_heads=8, head_dim=128), dict(num_heads=12)])
def test_few_short_sequences(options):
    """A list of few tiles, of one consumer each."""
    problem = Problem("few", ((300, 0), (80, 0)) * 3, dtype=bf16, causal=False, **options)
    form = choices.Form(are_few=True)
    with assume(HOPPER):
        call = hopper_call(problem)
        assert flash_varlen.kernels_of(call, 300)[0] == "hopper"
        assert flash_varlen.form_of(call, 300) == form
        assert choices.choose_tiles(call, form)[0].CONSUMERS == 1
        assert flash_varlen.form_of(call, 600) == choices.Form()
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
        # all tiles see about as many keys: one round of two consumers' tiles, not two of one's
        (((379, 2115),), (40, 8, 128), {}, 2560, (False, 2, 128, False, 1)),
        (((1406, 1147),), (8, 1, 128), {}, 2560, (False, 1, 128, False, 1)),
        # where one head would fill tiles, too
        (((870, 218),), (32, 8, 128), {}, 1280, (True, 2, 128, False, 4)),
        (((375, 70),), (64, 8, 128), {}, 512, (True, 2, 64, False, 8)),
        (((130, 5256),), (16, 4, 128), dict(window_size_left=1023), 6144, (True, 2, 64, True, 4)),
        (((1217, 825),), (16, 4, 128), dict(page_size=1), 2048, (True, 2, 64, False, 4)),
        (((300, 900),) * 4, (64, 8, 64), dict(page_size=1), 1280, (False, 3, 64, False, 8)),
        (((500, 600),) * 2, (32, 8, 128), {}, 1280, (True, 2, 128, False, 4)),
        (((500, 600),) * 4, (32, 8, 128), {}, 1280, (False, 2, 128, False, 4)),
    ],
)
def test_chunks(seqs, heads, options, reach, expected):
    """Whether tiles are numbered, consumers, keys, whether these are divided, and heads."""
    with assume(HOPPER):
        call = chunks(seqs, heads, reach=reach, **options)
        form = flash_varlen.form_of(call, 0)
        config, packed = choices.choose_tiles(call, form)
        found = form.is_numbered, config.CONSUMERS, config.BLOCK_N, config.SPLITS_KEYS, packed
    assert found == expected


@pytest.mark.parametrize(
    "queries, heads, reach, is_numbered, is_sorted",
    [
        (1008, (32, 32, 128), 2048, True, True),
        (1008, (32, 32, 128), 4096, False, False),  # its keys do not stay in the cache
        (1008, (32, 8, 128), 4096, False, True),  # better cut, as far as is known
        (260, (32, 8, 128), 1024, True, True),  # few rows
        (490, (64, 8, 128), 4096, False, True),
        (243, (40, 8, 128), 512, True, True),
        (1008, (32, 32, 128), 0, False, False),  # without hints
        (4000, (32, 8, 128), 2048, False, False),  # many tiles
    ],
)
def test_which_chunks_are_numbered(queries, heads, reach, is_numbered, is_sorted):
    with assume(HOPPER):
        call = chunks(((queries, 90),), heads, reach=reach)
        form = flash_varlen.form_of(call, 0)
        config, packed = choices.choose_tiles(call, form)
        assert form == choices.Form(is_numbered=is_numbered)
        heads_at_once = (
            tiles.sizes_of(
                call, tiles.options_of(call, config, packed, form), 0, packed
            ).heads_per_unit
            * packed
        )
        assert heads_at_once == (call.num_heads if is_sorted else call.group_size)
        assert tiles.options_of(call, config, packed, form).IS_LISTED is not is_numbered


@pytest.mark.parametrize(
    "seqs, heads, reach, consumers",
    [
        (((381, 8500),), (8, 4, 256), 16384, 2),
        (((482, 4000),), (8, 4, 256), 8192, 2),
        (((482, 2000),), (8, 4, 256), 4096, 1),
        (((166, 6800),), (28, 4, 128), 8192, 2),  # low tiles would read keys more often
        (((219, 1867),), (32, 32, 128), 4096, 2),  # few rows: these divide the keys
        (((243, 70),), (40, 8, 128), 512, 2),
        (((653, 70),), (40, 8, 128), 512, 2),  # more rows
        (((219, 1867),), (8, 8, 128), 4096, 2),
        (((115, 14735),), (8, 4, 256), 16384, 1),  # so few that keys are what there is to share
        (((1775, 27000),) * 4, (64, 8, 64), 32768, 3),
        (((1775, 2000),) * 4, (64, 8, 64), 4096, 2),
    ],
)
def test_consumers_of_chunks(seqs, heads, reach, consumers):
    with assume(HOPPER):
        config = choices.choose_tiles(chunks(seqs, heads, reach=reach))[0]
    has_few_rows = seqs[0][0] * heads[0] <= 132 * 80 and heads[2] == 128 and reach < 8192
    assert consumers == config.CONSUMERS and config.SPLITS_KEYS is has_few_rows


@pytest.mark.parametrize(
    "seqs, heads, options, expected",
    [
        # rows of keys are copied: heads of a tile, its keys, and consumers that divide them
        (((1100, 4000),), (32, 8, 128), dict(page_size=1, reach=8192), (1, 64, False)),
        (((1267, 4000),), (32, 8, 128), dict(page_size=1, reach=8192), (4, 64, False)),  # many
        (((1267, 4000),), (64, 8, 128), dict(page_size=1, reach=8192), (8, 64, False)),
        (((1267, 4000),), (8, 4, 256), dict(page_size=1, reach=8192), (1, 64, False)),
        (((120, 1400),), (32, 8, 128), dict(window_size_left=127), (4, 64, True)),  # few keys
        (((700, 1400),), (32, 8, 128), dict(window_size_left=127), (4, 64, False)),
        (((120, 9000),), (32, 8, 128), dict(window_size_left=4095, reach=16384), (4, 64, True)),
        (((300, 800),), (64, 8, 64), dict(kv_dtype=e4m3, reach=4096), (8, 128, False)),
    ],
)
def test_tiles_of_chunks(seqs, heads, options, expected):
    with assume(HOPPER):
        call = chunks(seqs, heads, **options)
        form = flash_varlen.form_of(call, 0)
        config, packed = choices.choose_tiles(call, form)
        assert (packed, config.BLOCK_N, config.SPLITS_KEYS) == expected
        # three consumers share copied rows, and need no list
        is_shared = options.get("page_size") == 1 and seqs[0][0] * heads[0] >= 288 * 128
        assert (config.CONSUMERS == 3) is is_shared
        is_near = "reach" not in options or "kv_dtype" in options
        assert form.is_numbered is (is_near or is_shared)


@pytest.mark.parametrize(
    "seqs, heads, runs_here",
    [  # the faster kernel of each, as measured on an H200
        (((70, 200),), (32, 8, 64), True),
        (((70, 1000),), (32, 8, 64), True),
        (((67, 0), (23, 0)), (32, 8, 64), False),
        (((240, 0),), (32, 8, 64), False),
        (((70, 0),), (16, 8, 256), True),
        (((70, 200),), (16, 8, 256), True),
        (((70, 500),), (32, 8, 128), True),
    ],
)
def test_kernel_of_small_chunks(seqs, heads, runs_here):
    with assume(HOPPER):
        problem = Problem("small", seqs, *heads, dtype=bf16, page_size=16)
        call = hopper_call(problem, max_seqlen_k=sum(max(seqs)))
        assert (flash_varlen.kernels_of(call, max(seqs)[0])[0] == "hopper") is runs_here


def test_stages_of_divided_keys_are_even():
    """A stage that both consumers waited for in turns would be passed by who is ahead."""
    with assume(HOPPER):
        for page_size, width in ((1, 64), (1, 128), (16, 64), (16, 128)):
            call = chunks(((90, 400),), (8, 2, width), page_size=page_size, reach=512)
            config, packed = choices.choose_tiles(call)
            options = tiles.options_of(call, config, packed)
            assert config.SPLITS_KEYS and options.KV_STAGES % options.CONSUMERS == 0
            assert options.ROW_GROUPS == 1 and options.CONSUMERS == 2
            fitted = fit_stages(options._replace(KV_STAGES=8), 2, 2)
            assert fitted.KV_STAGES < 8 and fitted.KV_STAGES % 2 == 0  # there is no room for more


@pytest.mark.parametrize("group, tokens", [(5, 12), (7, 9), (3, 21), (6, 10), (8, 8)])
def test_tokens_of_a_group_fill_a_tile(group, tokens):
    """Boxes of so many tokens and heads; what Triton compiles for has 64 rows."""
    with assume(HOPPER):
        call = chunks(((90, 90),), (4 * group, 4, 128), reach=512)
        config, packed = choices.choose_tiles(call)
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
            assert flash_varlen.kernels_of(hopper_call(problem))[0] == "hopper"
            for heads in (6, 10, 12, 14):
                call = hopper_call(dataclasses.replace(problem, num_heads=heads))
                assert flash_varlen.kernels_of(call)[0] == "hopper"


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


@pytest.mark.parametrize(
    "options, keys, expected",
    [
        (dict(head_dim=256), 4096, (1, 64, 240)),
        (dict(head_dim=256), 16384, (2, 64, 232)),
        (dict(head_dim=256, page_size=1), 16384, (2, 64, 224)),  # producers copy rows
        (dict(kv_dtype=e4m3), 2048, (1, 64, 216)),
        (dict(kv_dtype=e4m3), 4096, (1, 128, 216)),
        (dict(kv_dtype=e4m3, num_heads=64, num_kv_heads=1), 4096, (2, 128, 208)),  # mostly chunks
        (dict(), 4096, (2, 64, 208)),
    ],
)
def test_tiles_of_one_launch(options, keys, expected):
    """Of long and short sequences in a list: consumers, keys, registers."""
    plain = dict(num_heads=16, head_dim=128, page_size=16, dtype=bf16)
    problem = Problem("mixed", ((300, 60), *((1, 60),) * 40), **plain | options)
    with assume(HOPPER):
        table = torch.zeros(41, 2**17 // problem.page_size, dtype=torch.int32)
        call = hopper_call(problem, block_table=table, max_seqlen_k=keys)
        form = flash_varlen.form_of(call, 0)
        assert form == choices.Form(is_mixed=True)
        assert flash_varlen.kernels_of(call)[0] == "hopper"
        config, heads = choices.choose_tiles(call, form)
        assert expected == (config.CONSUMERS, config.BLOCK_N, config.REGISTERS)
        assert heads == call.group_size
