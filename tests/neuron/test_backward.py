"""What is Neuron's own in the backward: launches that share no row and no key, tiles that are
skipped, loops, programs that share the work. `tests/backends` has the named problems.
"""

import dataclasses
import functools

import hypothesis
import pytest
import torch
from covering import every_row, some
from hypothesis import strategies as st
from same_bits import same_bits

from torch_paged_attn import reference
from torch_paged_attn.backends.neuron import backward_plan
from torch_paged_attn.backends.neuron.backward_plan import cut, visible_tiles
from torch_paged_attn.backends.neuron.work_list import Batch, KeyTile, list_items
from torch_paged_attn.testing import (
    DIFFERENTIABLE,
    assert_accurate_gradients,
    build,
)
from torch_paged_attn.testing.inputs import hostile_gradients
from torch_paged_attn.testing.strategies import problems

P = 128
EXAMPLES = hypothesis.settings.default.max_examples
DEPTHS, KEY_TILES = (1, 2), (32, 64)
WIDTH = 32


@hypothesis.settings(max_examples=25, derandomize=True, database=None, deadline=None)
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=3),
    st.sampled_from((1, 2, 3, 8)),
    st.tuples(*(st.sampled_from((-1, 0, 5, 70)) for _ in range(2))),
    st.sampled_from((1, 4)),
)
def test_every_visible_pair_is_in_one_launch(seqs, group_size, window, grid):
    """And no launch has a row, or a key, in two rectangles."""
    q_lens, k_lens = (torch.tensor(lens) for lens in zip(*seqs, strict=True))
    bounds = torch.nn.functional.pad(q_lens.cumsum(0), (1, 0))
    batch = Batch(bounds, k_lens, int(bounds[-1]) + 3, *window, group_size)
    stacks, kinds = cut(batch, DEPTHS, KEY_TILES, grid)
    seen = [torch.zeros(q * group_size, k, dtype=torch.int) for q, k in seqs]
    starts = bounds.tolist()
    rows_of_launch, keys_of_launch = {}, {}
    for kind in kinds.unique(dim=0):
        launch, depth, tile_k, is_diagonal, adds_dq, adds_dkv = kind.tolist()
        alike = dataclasses.replace(stacks.of((kinds == kind).all(1)), depth=depth)
        work = list_items(batch, alike, KeyTile(tile_k, 1, depth))
        parts = visible_tiles(bool(is_diagonal), batch, work, WIDTH)
        names = ("stack", "sequence", "keys", "key_start", "key_stop", "row_start", "row_stop")
        table = {name: getattr(work, name).tolist() for name in names}
        rows = {name: getattr(work, name).tolist() for name in ("is_row", "token", "member")}
        for item in range(work.num_items):
            stack, keys, low = (table[name][item] for name in ("stack", "keys", "key_start"))
            assert (keys[low] - low) % grid == 0
            b = table["sequence"][stack]
            for level in range(depth):
                for lane in range(P):
                    start, stop = (table[x][item][level][lane] for x in ("row_start", "row_stop"))
                    is_row, token, member = (x[stack][level][lane] for x in rows.values())
                    if not is_row:
                        assert start == stop
                        continue
                    row = (token - starts[b]) * group_size + member
                    # what the kernel skips shows nothing
                    for part, shown in enumerate(parts):
                        columns = {tile[0]: tile[1] for tile in shown}
                        skipped = part * WIDTH + columns.get(level, 0)
                        assert not max(start, skipped) < min(stop, (part + 1) * WIDTH)
                    if start < stop:
                        first = keys[start]
                        seen[b][row, first : first + stop - start] += 1
            for key in keys[low : table["key_stop"][item]]:
                owner = keys_of_launch.setdefault((launch, b, key), item)
                assert owner == item
                is_first = all((n, b, key) not in keys_of_launch for n in range(launch))
                assert is_first or adds_dkv
        for stack in range(len(work.sequence)):
            b = int(work.sequence[stack])
            pairs = torch.stack([work.token[stack], work.member[stack]], -1)[work.is_row[stack]]
            for pair in map(tuple, pairs.tolist()):
                assert (launch, b, pair) not in rows_of_launch
                is_first = all((n, b, pair) not in rows_of_launch for n in range(launch))
                assert is_first or adds_dq
                rows_of_launch[launch, b, pair] = stack
    for b, (query_len, key_len) in enumerate(seqs):
        position = key_len - query_len + torch.arange(query_len)
        start, stop = batch.visible(position, torch.tensor(key_len))
        key = torch.arange(key_len)
        wanted = (key >= start[:, None]) & (key < stop[:, None])
        assert torch.equal(seen[b], wanted.repeat_interleave(group_size, 0).int())


@pytest.fixture
def small(monkeypatch):
    """Many rectangles, of few rows and keys."""
    monkeypatch.setattr(backward_plan, "DEPTHS", (1, 2))
    monkeypatch.setattr(backward_plan, "KEY_TILES", (P,))
    monkeypatch.setattr(backward_plan, "SHORTEST", P)
    backward_plan.plan_cache.clear()
    yield
    backward_plan.plan_cache.clear()


LONG = dataclasses.replace(
    DIFFERENTIABLE["llama3_8b/prefill_ragged/bf16"],
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    seqs=((200, 90), (70, 0)),
)
CASES = {
    "causal": LONG,
    "window": dataclasses.replace(LONG, window_size_left=60, dtype=torch.float32),
    "bias": dataclasses.replace(
        LONG, causal=False, seqs=((150, 0),), bias="float", dtype=torch.float32
    ),
}


RESULTS = ("dout", "dlse", "out", "softmax_lse")


def given_of(call):
    out, lse = reference.flash_varlen(**call.args)
    return call.backward(*hostile_gradients(call, out, lse), out, lse)


def gradients(call):
    from torch_paged_attn.backends.neuron import BACKEND

    return BACKEND.function(call.op)(**call.args)


@pytest.mark.parametrize("name", CASES)
def test_sums_of_several_launches(name, small, machine):
    call = build(CASES[name])
    backward = given_of(call)
    found = gradients(backward)
    assert_accurate_gradients(found, call.gradients(*(backward.args[n] for n in ("dout", "dlse"))))


@pytest.mark.parametrize("keys", [1200, 5000], ids=["one item", "several"])
def test_a_stack_forgets_the_dq_of_the_one_before(keys, machine):
    """Each sequence is a stack of one item, which clears its dq, or of several: the first does."""
    call = build(dataclasses.replace(LONG, causal=False, seqs=((10, keys), (10, keys))))
    backward = given_of(call)
    found = gradients(backward)
    assert_accurate_gradients(found, call.gradients(*(backward.args[n] for n in ("dout", "dlse"))))


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_key_that_a_bias_hides_from_all_may_be_nan(name, machine):
    """It lies among keys that rows see, and is loaded with them."""
    call = build(dataclasses.replace(CASES["bias"], seqs=((20, 10),), bias="bool"))
    call.args["attn_bias"][..., 7] = False
    call.args[name][7] = 0.0
    backward = given_of(call)
    finite = gradients(backward)
    call.args[name][7] = float("nan")
    assert same_bits(gradients(call.backward(*(backward.args[x] for x in RESULTS))), finite)


def test_a_bias_over_several_stretches_of_keys(machine):
    call = build(dataclasses.replace(CASES["bias"], seqs=((20, 600),)))
    backward = given_of(call)
    found = gradients(backward)
    assert_accurate_gradients(found, call.gradients(*(backward.args[n] for n in ("dout", "dlse"))))


@pytest.mark.parametrize("is_dynamic", some((False, True), True))
def test_two_programs_write_apart_in_either_order(is_dynamic, small, machine, monkeypatch):
    import nki_emulator

    from torch_paged_attn.backends.neuron import attention

    backward = given_of(build(dataclasses.replace(LONG, num_heads=1, seqs=((140, 0), (10, 0)))))
    alone = gradients(backward)
    monkeypatch.setattr(attention, "UNROLLED", 0 if is_dynamic else 2**20)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    backward_plan.plan_cache.clear()
    assert same_bits(gradients(backward), alone)
    backwards = functools.partial(nki_emulator.simulate, reverse=True)
    monkeypatch.setattr(nki_emulator, "simulate", backwards)
    assert same_bits(gradients(backward), alone)


# found by drawing: a window's first key is no multiple of the four for which dropout's bits are
# drawn together; a tile of 384 keys beside a head of two steps
DROPOUT_UNDER_A_WINDOW = dataclasses.replace(
    LONG, seqs=((5, 7),), causal=False, window_size_left=0, dropout_p=0.3
)
WIDE_BESIDE_384_KEYS = dataclasses.replace(LONG, seqs=((30, 300),), head_dim=160, head_dim_v=64)
# what needs no mask: all of it, what a row's last keys, or its first ones, are hidden from
WHOLE = dataclasses.replace(LONG, seqs=((128, 128),), num_heads=1, causal=False)
FULL_TILES = {
    "all": WHOLE,
    "causal": dataclasses.replace(WHOLE, causal=True),
    "window": dataclasses.replace(WHOLE, window_size_left=100),
    "two sequences": dataclasses.replace(WHOLE, seqs=((128, 128), (100, 156))),
    "dropout": DROPOUT_UNDER_A_WINDOW,
    "wide": WIDE_BESIDE_384_KEYS,
}
# whose sums come out as rows where DMA does not transpose: of one tile of queries and of several,
# of one to four tiles of keys; where heads are of 128, with dk's products turning the first tile
HEADS_OF_128 = dataclasses.replace(WHOLE, head_dim=128, softmax_scale=0.3)
ROWS = {
    f"{queries} by {keys}{', causal' if causal else ''}": dataclasses.replace(
        HEADS_OF_128, seqs=((queries, keys - queries), (100, 20)), causal=causal
    )
    for queries, keys, causal in (
        (128, 128, False),
        (100, 512, False),
        (250, 128, False),
        (256, 256, False),
        (250, 250, True),
        (384, 384, True),
    )
}
ROWS["several launches"] = dataclasses.replace(HEADS_OF_128, seqs=((300, 0),), num_heads=2)
ROWS["other values"] = dataclasses.replace(HEADS_OF_128, seqs=((200, 50),), head_dim_v=320)
ROWS["wide"] = dataclasses.replace(HEADS_OF_128, seqs=((300, 50),), head_dim=256)
ROWS["wide, causal"] = dataclasses.replace(ROWS["wide"], causal=True, dtype=torch.float32)
ROWS["float32"] = dataclasses.replace(HEADS_OF_128, seqs=((200, 50),), dtype=torch.float32)


@pytest.mark.parametrize(
    ("machine", "name"),
    every_row(3, [(generation, name) for generation in (2, 3) for name in FULL_TILES]),
    indirect=["machine"],
)
def test_tiles_without_masks(name, machine):
    """And the problems that drawing found."""
    call = build(FULL_TILES[name])
    backward = given_of(call)
    found = gradients(backward)
    assert_accurate_gradients(found, call.gradients(*(backward.args[n] for n in ("dout", "dlse"))))


# the third generation turns them by DMA where the second does not
BY_GENERATION = [
    pytest.param(3, name, marks=() if i % 3 == 0 else pytest.mark.device_suite)
    for i, name in enumerate(ROWS)
]


@pytest.mark.parametrize(
    ("machine", "name"),
    [*every_row(2, [(2, name) for name in ROWS]), *BY_GENERATION],
    indirect=["machine"],
)
def test_sums_that_come_as_rows(name, machine, request):
    if name == "several launches":
        request.getfixturevalue("small")
    call = build(ROWS[name])
    backward = given_of(call)
    found = gradients(backward)
    assert_accurate_gradients(found, call.gradients(*(backward.args[n] for n in ("dout", "dlse"))))
    assert machine.peak["psum"] <= 16 * 1024


def test_a_row_of_nan_stays_a_row(machine):
    """Of dq, where TensorE copies what it turns bit by bit: from the third generation on."""
    call = build(dataclasses.replace(ROWS["float32"], seqs=((256, 0),)))
    backward = given_of(call)
    finite, *_ = gradients(backward)
    backward.args["dout"][200] = float("nan")  # of the tile that the products of dk turn
    found, *_ = gradients(backward)
    assert found[200].isnan().all()
    others = torch.arange(len(found)) != 200
    assert same_bits([found[others]], [finite[others]])


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["dq", "dk and dv"])
def test_dq_alone_and_dk_with_dv_alone(wanted, request):
    """One of dq and dk with dv: nothing else is turned by the products of dk."""
    from nki_emulator import emulated

    call = build(ROWS["256 by 256"])
    backward = given_of(call)
    with emulated(2):
        both = gradients(backward)
        dq, dkv = wanted
        backward.args["output_mask"] = [dq, dkv, dkv, False, False]
        found = gradients(backward)
    assert same_bits([x for x in found if x.numel()], both[:1] if dq else both[1:3])


@hypothesis.settings(max_examples=EXAMPLES // 3 if EXAMPLES > 100 else 15)
@hypothesis.given(
    problems(trains=True),
    st.sampled_from((2, 3, 4)),
    st.sampled_from((1, 2)),
    st.booleans(),
)
@hypothesis.example(DROPOUT_UNDER_A_WINDOW, 3, 1, False)
@hypothesis.example(WIDE_BESIDE_384_KEYS, 2, 1, False)
def test_fuzzed_gradients_agree_with_the_reference(problem, generation, programs, is_dynamic):
    from nki_emulator import emulated

    from torch_paged_attn.backends.neuron import attention

    call = build(problem)
    backward = given_of(call)
    with pytest.MonkeyPatch.context() as patch, emulated(generation):
        patch.setenv("NEURON_LOGICAL_NC_CONFIG", str(programs))
        patch.setattr(attention, "UNROLLED", 0 if is_dynamic else 2**20)
        found = gradients(backward)
    assert_accurate_gradients(found, call.gradients(*(backward.args[n] for n in ("dout", "dlse"))))
