"""Lists of latent keys on Hopper: which calls the kernel takes, how tokens are dealt out, what the
compiler makes of it, how parts are added up and, on a Hopper chip, its results."""

import dataclasses
import subprocess
import tempfile
from pathlib import Path

import cross_compile
import pytest
import torch
import triton
from compiled_calls import attention
from covering import left_out
from hopper_calls import HAS_HOPPER, HOPPER, hopper_call

from torch_paged_attn.backends.triton.hopper.selected import plan as selected
from torch_paged_attn.backends.triton.hopper.selected.arguments import ListPointers
from torch_paged_attn.backends.triton.hopper.selected.combine import (
    _hopper_selected_combine_kernel,
)
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch
from torch_paged_attn.backends.triton.runtime.target import Target, assume
from torch_paged_attn.testing import Problem, Selected, assert_accurate, build

bf16, f16 = torch.bfloat16, torch.float16

# around the ends of blocks and pairs of blocks; without keys; with more queries than keys
EDGES = ((1, 63), (2, 64), (0, 50), (1, 127), (3, -2), (2, 300))
SHAPES = tuple(
    Problem(
        name,
        options.pop("seqs", EDGES),
        heads,
        1,
        options.pop("dim", 576),
        512,
        selected=Selected(*lists),
        **({"dtype": bf16, "cache_layout": "mla"} | options),
    )
    for name, heads, lists, options in (
        ("h128_page64", 128, (128,), dict(page_size=64)),
        ("h64_packed_counted", 64, (130, 1, "one", 0.1, True), dict(causal=False)),
        ("h70_page1", 70, (65, 1, "one", 0.3), dict(page_size=1, padding_rows=3, sinks=True)),
        ("h16_page544_window", 16, (127,), dict(page_size=544, window_size_left=90, dtype=f16)),
        ("h128_slots", 128, (64, 1, "one", 0.2, False, False, True), dict(page_size=16)),
        ("h64_one_row_of_values", 64, (200,), dict(dim=512, page_size=64, sinks=True)),
        (
            "h128_rope_apart",
            128,
            (96, 1, "one", 0.0, False, True),
            dict(dim=64, latent=True, page_size=64, cache_layout="nhd"),
        ),
        ("h8_nothing", 8, (40, 1, "one", 1.0), dict(sinks=True)),
        ("h64_no_entries", 64, (0,), {}),
        ("h64_long", 64, (1500,), dict(seqs=((2, 1600), (1, 40)), sinks=True)),
    )
)
# latents of 8 bits with scales by column, as rows of 656 bytes
ROWS = dict(dim=64, latent=True, page_size=64, cache_layout="rows", v_dtype=torch.float8_e4m3fn) | {
    "descale": "columns"
}
SCALED = tuple(
    Problem(
        name,
        options.pop("seqs", EDGES),
        heads,
        1,
        options.pop("dim"),
        512,
        selected=Selected(*lists),
        **({"dtype": bf16} | options),
    )
    for name, heads, lists, options in (
        ("bytes_h8", 8, (127, 1, "one", 0.1), ROWS | {}),
        ("bytes_h16_sinks", 16, (130, 1, "one", 0.1, True), ROWS | dict(page_size=16, sinks=True)),
        ("bytes_h5_page1", 5, (65, 1, "one", 0.3), ROWS | dict(page_size=1, padding_rows=3)),
        ("bytes_h16_window", 16, (127,), ROWS | dict(page_size=544, window_size_left=90)),
        ("bytes_h8_slots", 8, (64, 1, "one", 0.2, False, False, True), ROWS | {}),
        ("bytes_h8_nothing", 8, (40, 1, "one", 1.0), ROWS | dict(sinks=True)),
        ("bytes_h9_no_entries", 9, (0,), ROWS | {}),
        ("bytes_h8_long", 8, (1500, 1, "one", 0.05), ROWS | dict(seqs=((2, 1600), (1, 40)))),
    )
)
SHAPES += SCALED
SHAPES = tuple(dataclasses.replace(p, causal=False) if p.selected.slots else p for p in SHAPES)
over_shapes = pytest.mark.parametrize("problem", SHAPES, ids=[p.name for p in SHAPES])


def unsupported(problem, **changes):
    with assume(HOPPER):
        return selected.unsupported(hopper_call(problem, **changes))


@over_shapes
def test_supported(problem):
    assert unsupported(problem) is None


@pytest.mark.parametrize(
    "changes, word",
    [
        (dict(softcap=1.0), "softcap"),
        (dict(out_dtype=torch.float32), "out_dtype"),
        (dict(softmax_scale=-1.0), "softmax_scale"),
        (dict(select_size=2), "select_size"),
        (dict(k_descale=torch.ones(())), "k_descale"),
        (dict(v=torch.zeros(9, 1, 64, 512, dtype=bf16)), "values are no columns"),
        (dict(q=torch.zeros(9, 128, 576)), "float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported(changes, word):
    assert word in unsupported(SHAPES[0], **changes)


OF_16_BITS = torch.zeros(9, 1, 64, 512, dtype=bf16)


@pytest.mark.parametrize(
    "problem, changes, word",
    [
        (dataclasses.replace(SCALED[0], dtype=f16), {}, "float16"),
        (dataclasses.replace(SCALED[0], cache_layout="nhd"), {}, "equally far apart"),
        (dataclasses.replace(SCALED[0], num_heads=17), {}, "more than 16 heads"),
        (SCALED[0], dict(v=OF_16_BITS), "with scales by column"),
        (SCALED[0], dict(softcap=1.0), "softcap"),
        (SCALED[0], dict(k_descale=torch.ones(())), "k_descale"),
        (SCALED[0], dict(v_descale=torch.ones(9, 4, 64, 1).mT), "equally far apart"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_scales(problem, changes, word):
    assert word in unsupported(problem, **changes)


def test_unsupported_chips():
    with assume(Target.of_arch("sm100", 148)):
        assert "Hopper" in selected.unsupported(hopper_call(SHAPES[0]))


@pytest.mark.parametrize(
    "tokens, heads, pairs, groups, units",
    [
        (4096, 128, 16, 66, 16),  # many tokens: equal shares
        (256, 128, 16, 64, 1),  # four for each group
        (1, 128, 16, 16, 16),  # each pair of blocks by another group
        (3, 64, 16, 48, 16),
        (64, 8, 16, 128, 16),  # tiles of 16 heads
        (1, 64, 1, 1, 1),
    ],
)
def test_tokens_are_dealt_out(tokens, heads, pairs, groups, units):
    lists = Selected(128 * pairs)
    problem = dataclasses.replace(SHAPES[0], num_heads=heads, seqs=((tokens, 9),), selected=lists)
    call = hopper_call(problem)
    with assume(HOPPER):
        options = selected.options_of(call)
        assert selected.shares_of_call(call, options)[:2] == (groups, units)
        invariant = dataclasses.replace(call, batch_invariant=True)
        assert selected.shares_of_call(invariant, options)[1:] == (1, 0)


def _leave_parts(call, groups, units, options):
    """What the groups' programs leave of each token that several share, by the formula, and the
    results of the tokens that one group has alone."""
    out, lse = call.new_results()
    total = call.total_q * units
    programs = groups * options.HEAD_TILES
    parts = torch.full((2 * programs, 64, 512), float("nan"))
    stats = torch.full((2 * programs, 2, 64), float("nan"))
    keys = call.k[:, 0].float()
    for group in range(groups):
        unit, stop = total * group // groups, total * (group + 1) // groups
        while unit < stop:
            token, first = divmod(unit, units)
            count = min(units - first, stop - unit)
            unit += count
            listed = call.selection.key_indices[token, 0, 128 * first : 128 * (first + count)]
            k = keys[listed[listed >= 0].long()]
            s = call.q[token].float() @ k.mT * (call.scale * 1.4426950408889634)
            m = torch.cat([s, torch.full((call.num_heads, 1), -torch.inf)], 1).amax(1)
            p = torch.exp2(s - m.nan_to_num(neginf=0.0)[:, None])
            acc, weights = p @ k[:, :512], p.sum(1)
            if count == units:
                sink = torch.exp(call.sinks - m * 0.6931471805599453)
                out[token] = (acc / (weights + sink)[:, None]).to(out.dtype)
                lse[:, token] = m * 0.6931471805599453 + (weights + sink).log()
                continue
            for head in range(call.num_heads):
                part = (2 * group + (first == 0)) * options.HEAD_TILES + head // 64
                parts[part, head % 64] = acc[head]
                stats[part, :, head % 64] = torch.stack((m[head], weights[head]))
    return torch.cat((parts.flatten(), stats.flatten())), out, lse


@pytest.mark.parametrize("groups", [3, left_out(2), left_out(7), left_out(15)])
def test_parts_are_added_up(groups, device):
    problem = dataclasses.replace(SHAPES[1], num_heads=70, seqs=((5, 600),), sinks=True)
    problem = dataclasses.replace(problem, selected=Selected(384, holes=0.1))
    call = hopper_call(problem, "cpu")
    options, units = selected.options_of(call), 3
    parts, out, lse = (x.to(device) for x in _leave_parts(call, groups, units, options))
    given = {"lse": lse, "parts": parts, "cu_seqlens_q": call.cu_seqlens_q.to(device)}
    given["sinks"] = call.sinks.to(device)
    pointers = ListPointers(**dict.fromkeys(ListPointers._fields) | given)
    _hopper_selected_combine_kernel[(min(groups - 1, call.total_q), 5, 1)](
        out, pointers, **selected.sizes_of(call, units)._asdict(), num_heads=call.num_heads,
        programs=groups * options.HEAD_TILES, OPTIONS=options, SHARES=(16, 2, 512),
        **dependent_launch(False),
    )  # fmt: skip
    assert_accurate(out, lse, build(problem).truth())


def compile_lists(problem):
    """The kernels of a launch, compiled in another process, and the first one's waits for products.
    If the assembler finds fault with a kernel's products, it waits after each of them."""
    cubins = []

    def read(arch, name, binary, read=cross_compile._read):
        cubins.append(binary.asm["cubin"])
        return read(arch, name, binary)

    cross_compile._read = read
    cross_compile.CALLS["lists"] = lambda: attention(problem)
    kernels = cross_compile.compile_call("sm90", "lists")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubins[0])
        file.flush()
        command = [tool, "-sass", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return kernels, code.count("WARPGROUP.DEPBAR")


@pytest.mark.parametrize(
    "problem",
    [
        p if p in (SHAPES[0], SHAPES[3], SCALED[1]) else pytest.param(p, marks=pytest.mark.thorough)
        for p in SHAPES
    ],
    ids=lambda p: p.name,
)
def test_compiles_to_products(problem, compiler):
    (kernel, *_), waits = compiler.submit(compile_lists, problem).result()
    form = "few_heads" if problem.num_heads <= selected.FEW_HEADS else "fwd"
    if problem in SCALED:
        form = "bytes" if problem.num_heads <= selected.FEWEST_HEADS else "bytes_few_heads"
    assert kernel.name == "_hopper_selected_fwd_kernel"
    assert kernel.faults("sm90", problem.name) == []
    rope = 0 if problem.head_dim == 512 else 4
    # three times scores, four times values of 64 keys: the first pair's are apart. Of few heads,
    # both blocks of a pair, and eight tiles of columns of values
    of_form = {"fwd": 3 * (32 + rope) + 4 * 4, "few_heads": 2 * (32 + rope) + 2 * 8 * 4}
    of_form["bytes_few_heads"] = of_form["bytes"] = of_form["few_heads"]
    assert kernel.matrix_instructions >= of_form[form]
    # operands in registers are waited for, group after group
    assert waits < kernel.matrix_instructions / (4 if form == "bytes" else 8)
    # sinks and rope keys that lie apart take four registers more than there are
    # and 16 heads beside latents of 8 bits eight, which are stored and loaded once for each tile
    most = {"bytes": 136, "bytes_few_heads": 32}.get(form, 16)
    assert kernel.spills <= most or not cross_compile.IS_FITTED


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@over_shapes
def test_agrees_with_the_reference(problem):
    call = hopper_call(problem, "cuda")
    assert selected.unsupported(call) is None
    first, second = (build(problem).to("cuda").run() for _ in range(2))
    assert_accurate(*first, build(problem).truth())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
