"""Seeded faults in the Neuron backend: each has to make a test fail.

    python tests/neuron/mutants.py [NAME ...]      (make thorough)

A fault is one replacement in one file of a copy of the package. The tests that are to see it, which
pass without it, run first, alone and with all their cases; where they pass, every test of the
backend runs, and the fault has survived if all do.
"""

import concurrent.futures
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BYTES = ("tests/neuron/test_eight_bits.py",)
LONG = "tests/neuron/test_attention.py", "-k", "test_long_tiles and 3-"
SHARED = "tests/neuron/test_attention.py", "-k", "share_ or beside_short"
EVERYTHING = ("tests/neuron", "tests/backends", "--backend", "neuron")


def suite(which, *, on=3):
    """Tests of the conformance suite on one generation, by a part of their names."""
    return "tests/backends", "--backend", f"neuron-{on}", "-k", which


@dataclasses.dataclass(frozen=True)
class Fault:
    name: str
    file: str  # within backends/neuron
    old: str
    new: str
    tests: tuple[str, ...]


DEQUANT, GATHER, LOAD = "kernels/dequant.py", "kernels/gather_scatter.py", "kernels/load_item.py"
TILE, ATTENTION, PHILOX = "kernels/query_tile.py", "kernels/attention.py", "kernels/philox.py"
TILE_BACK, BACKWARD = "kernels/backward_tile.py", "kernels/attention_backward.py"

SINKS = suite("agrees and gpt_oss and not gradients")
MIXED = suite("test_agrees and llama3_8b/mixed/bf16")
BIAS = suite("test_agrees and t5")
DROPOUT = suite("test_agrees and dropout")
WINDOW = suite("test_agrees and mistral/window/f32")
SPARSE = suite("test_agrees and phi3")
WRITES = suite("test_write and not bfloat16")
GRADIENTS = suite("gradients_agree and more_queries")
GRADIENTS_LONG = suite("gradients_agree and training/long")
GRADIENTS_DROPOUT = suite("gradients_agree and training/dropout")
LAUNCHES = ("tests/neuron/test_backward.py",)
GRADIENTS_OPTIONS = suite("gradients_agree and gpt_oss")

FAULTS = (
    Fault(
        "448 is NaN",
        DEQUANT,
        "op0=nl.equal, operand0=NAN_BITS",
        "op0=nl.greater_equal, operand0=NAN_BITS - 128.0",
        BYTES,
    ),
    Fault("NaN is a number", DEQUANT, "operand0=14)", "operand0=13)", BYTES),
    Fault("e4m3fn without signs", DEQUANT, "operand0=0x80", "operand0=0x00", BYTES),
    Fault("e4m3fn without its top bit", DEQUANT, "operand0=0x7F, op1", "operand0=0x3F, op1", BYTES),
    Fault("e4m3fn halved", DEQUANT, "operand0=256.0", "operand0=128.0", BYTES),
    Fault(
        "e4m3 of generation 3 taken for e4m3fn",
        DEQUANT,
        "nc_version.gen4",
        "nc_version.gen3",
        BYTES,
    ),
    Fault(
        "keys leave a bad row out",
        LOAD,
        "heads, run, nisa.oob_mode.error",
        "heads, run, nisa.oob_mode.skip",
        BYTES,
    ),
    Fault("page ids unchecked", "plan.py", ".clamp(0, options.num_pages - 1)", "", BYTES),
    Fault(
        "page ids one short", "plan.py", "options.num_pages - 1)", "options.num_pages - 2)", BYTES
    ),
    Fault(
        "gather takes heads by tokens",
        GATHER,
        "[layout.head_stride, heads]",
        "[layout.token_stride, heads]",
        MIXED,
    ),
    Fault(
        "gather without its offset",
        GATHER,
        (
            "offset=layout.offset,\n"
            "            vector_offset=index,\n"
            "            indirect_dim=0,\n"
            "        )\n        nisa.dma_copy(dst=tile"
        ),
        (
            "offset=0,\n"
            "            vector_offset=index,\n"
            "            indirect_dim=0,\n"
            "        )\n        nisa.dma_copy(dst=tile"
        ),
        suite("test_agrees and vllm_cache"),
    ),
    Fault(
        "scatter refuses what it has to skip",
        GATHER,
        "dst=scattered, src=tile, oob_mode=nisa.oob_mode.skip",
        "dst=scattered, src=tile, oob_mode=nisa.oob_mode.error",
        MIXED,
    ),
    Fault(
        "queries refuse what they have to skip",
        LOAD,
        "part, 1, 1, nisa.oob_mode.skip)\n        if",
        "part, 1, 1, nisa.oob_mode.error)\n        if",
        MIXED,
    ),
    Fault(
        "key range one late",
        LOAD,
        "program.key_of_partition, bound, columns.key_start,",
        "program.key_of_partition, bound, columns.key_stop,",
        MIXED,
    ),
    Fault(
        "shared keys are cleared as unshared ones are",
        LOAD,
        "outside(unseen_k, program.key_of_share, bound, columns.key_start",
        "outside(unseen_k, program.key_of_share, bound, columns.key_stop",
        SHARED,
    ),
    Fault(
        "heads that share a gather get the first one's keys",
        "work_info.py",
        "* rows[0].rows_of_head",
        "* 0",
        SHARED,
    ),
    Fault(
        "heads that share a gather are swapped",
        TILE,
        "offset=i * part\n",
        "offset=(share - 1 - i) * part\n",
        SHARED,
    ),
    Fault(
        "a run of shared keys passes the end of what is seen",
        "work_list.py",
        "longest = grain * tile.share",
        "longest = grain",
        SHARED,
    ),
    Fault(
        "every stack has long tiles",
        "work_list.py",
        "(shortest, stacks.of(~fits))",
        "(longer[-1], stacks.of(~fits))",
        SHARED,
    ),
    Fault("bias shows absent keys", LOAD, "op=nl.logical_or)", "op=nl.logical_and)", BIAS),
    Fault(
        "unseen values are multiplied",
        ATTENTION,
        "    clear_unseen(values, at, item.unseen)\n",
        "",
        suite("unseen_memory or nan_stays"),
    ),
    Fault(
        "the last stack's maxima stay",
        ATTENTION,
        (
            "nisa.tensor_copy_predicated(dst=stack.maxima, src=FLOOR, "
            "predicate=spread(begins, 0, cells))"
        ),
        "pass",
        MIXED,
    ),
    Fault(
        "the last stack's sums stay",
        ATTENTION,
        (
            "nisa.tensor_copy_predicated(dst=stack.sums, src=0.0, "
            "predicate=spread(begins, 0, cells))"
        ),
        "pass",
        MIXED,
    ),
    Fault(
        "softmax_lse without the maximum",
        ATTENTION,
        ("nisa.tensor_tensor(dst=lse_tile, data1=lse_tile, data2=top, op=nl.add)"),
        "pass",
        MIXED,
    ),
    Fault(
        "sinks twice",
        ATTENTION,
        "nisa.tensor_tensor(dst=total, data1=total, data2=tail, op=nl.add)",
        "nisa.tensor_tensor(dst=total, data1=total, data2=total, op=nl.add)",
        SINKS,
    ),
    Fault(
        "sinks below the maximum",
        ATTENTION,
        "data1=maxima, data2=sink, op=nl.maximum",
        "data1=maxima, data2=sink, op=nl.minimum",
        SINKS,
    ),
    Fault(
        "values without their descale",
        ATTENTION,
        ("dst=weight, data1=weight, data2=scalars[:, :, VALUE_SCALE], op=nl.multiply"),
        "dst=weight, data1=weight, data2=weight, op=nl.maximum",
        suite("test_agrees and kv_e4m3"),
    ),
    Fault(
        "scores without their descale",
        ATTENTION,
        ("        factor = stack.scalars[:, level, head, SCORE_SCALE : SCORE_SCALE + 1]\n"),
        "        pass\n",
        suite("test_agrees and kv_e4m3"),
    ),
    Fault(
        "dropout of the first head",
        ATTENTION,
        "first_of_group = (program.first_head + head) * options.group_size",
        "first_of_group = 0",
        DROPOUT,
    ),
    Fault(
        "the sum is not rescaled",
        TILE,
        "dst=l_i, data=l_i, op0=nl.multiply, operand0=acc_scale",
        "dst=l_i, data=l_i, op0=nl.multiply, operand0=1.0",
        suite("test_agrees and prefill_2048"),
    ),
    Fault(
        "the result is not rescaled",
        TILE,
        "dst=acc, data=acc, op0=nl.multiply, operand0=acc_scale",
        "dst=acc, data=acc, op0=nl.multiply, operand0=1.0",
        suite("test_agrees and prefill_2048"),
    ),
    Fault(
        "the new maximum alone counts",
        TILE,
        ("nisa.tensor_tensor(dst=row_max, data1=row_max, data2=m_i, op=nl.maximum)"),
        "pass",
        suite("test_agrees and prefill_2048"),
    ),
    Fault(
        "the last visible key is hidden",
        TILE,
        "comp_op1=nl.less,",
        "comp_op1=nl.less_equal,",
        MIXED,
    ),
    Fault(
        "the first visible key is hidden",
        TILE,
        "comp_op0=nl.greater_equal,",
        "comp_op0=nl.greater,",
        WINDOW,
    ),
    Fault(
        "no softcap",
        TILE,
        "nisa.activation(dst=scores, op=nl.tanh, data=product, scale=scale)",
        "nisa.activation(dst=scores, op=nl.copy, data=product, scale=scale)",
        suite("test_agrees and gemma2"),
    ),
    Fault(
        "ALiBi in one direction",
        TILE,
        "op1=nl.minimum,",
        "op1=nl.maximum,",
        suite("test_agrees and bloom"),
    ),
    Fault(
        "a low bias overflows",
        TILE,
        "op0=nl.maximum, operand0=LOWEST",
        "op0=nl.maximum, operand0=3.0 * MASKED",
        ("tests/neuron/test_bias.py",),
    ),
    Fault(
        "products of the last step alone",
        TILE,
        "                accumulate=step > 0,\n            )\n        scale_scores",
        "                accumulate=False,\n            )\n        scale_scores",
        suite("test_agrees and deepseek/prefill"),
    ),
    Fault(
        "the first bank of a long tile twice",
        TILE,
        "moving=keys[0:rows, step, first:last]",
        "moving=keys[0:rows, step, 0 : last - first]",
        LONG,
    ),
    Fault(
        "runs in the order of keys",
        TILE,
        "[run * P, chunks], [1, P], [P, run]]\n    return p",
        "[run * P, chunks], [run, P], [1, run]]\n    return p",
        LONG,
    ),
    Fault(
        "a run's last four tokens apart",
        TILE,
        "first + t, start:stop], identity)",
        "t, start:stop], identity)",
        LONG,
    ),
    Fault(
        "nine rounds of Philox",
        PHILOX,
        "for step in range(ROUNDS):",
        "for step in range(ROUNDS - 1):",
        DROPOUT,
    ),
    Fault(
        "Philox loses a carry",
        PHILOX,
        "upper = combined(top, bits_of(cross, nl.right_shift, 16), nl.add)",
        "upper = top",
        DROPOUT,
    ),
    Fault(
        "a block more than is listed",
        "columns.py",
        "(block * size < stop[stack])",
        "(block * size < stop[stack] - size)",
        SPARSE,
    ),
    Fault(
        "the first of two tokens for a slot wins",
        "reshape_and_cache.py",
        "F.pad(ordered[1:] != ordered[:-1], (0, 1), value=True)",
        "F.pad(ordered[1:] != ordered[:-1], (1, 0), value=True)",
        WRITES,
    ),
    Fault(
        "8-bit writes wrap round",
        "reshape_and_cache.py",
        "real.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)",
        "real",
        WRITES,
    ),
    Fault(
        "int8 writes are cut off",
        "reshape_and_cache.py",
        "real.round().clamp",
        "real.trunc().clamp",
        WRITES,
    ),
    Fault(
        "padding tokens see sinks",
        "row_scalars.py",
        "is_padding | (sinks",
        "(sinks",
        suite("padding_rows"),
    ),
    Fault(
        "no delta",
        TILE_BACK,
        "op0=nl.subtract, operand0=delta",
        "op0=nl.subtract, operand0=0.0",
        GRADIENTS,
    ),
    Fault(
        "hidden keys have gradients",
        TILE_BACK,
        "comp_op1=nl.less,",
        "comp_op1=nl.less_equal,",
        GRADIENTS,
    ),
    Fault(
        "dq of the first chunk alone",
        BACKWARD,
        "accumulate=chunk > 0",
        "accumulate=False",
        GRADIENTS_LONG,
    ),
    Fault(
        "dk of the last tile alone",
        BACKWARD,
        "sum_over_queries(dk, stack.q[:, level], dx, level > begin)",
        "sum_over_queries(dk, stack.q[:, level], dx, False)",
        GRADIENTS_LONG,
    ),
    Fault(
        "dq without its scale",
        BACKWARD,
        "turn_back(sums, options.out_scale, tensors.dq",
        "turn_back(sums, 1.0, tensors.dq",
        GRADIENTS_OPTIONS,
    ),
    Fault(
        "dq of the first four tiles again and again",
        BACKWARD,
        "sums = stack.dq[:, :, first * P : last * P]",
        "sums = stack.dq[:, :, 0 : last * P - first * P]",
        GRADIENTS_LONG,
    ),
    Fault(
        "the last stack's dq stays",
        BACKWARD,
        (
            "nisa.tensor_copy_predicated("
            "dst=stack.dq.reshape((size, width)), src=0.0, predicate=predicate)"
        ),
        "pass",
        GRADIENTS,
    ),
    Fault(
        "launches overwrite what others left",
        BACKWARD,
        "        if is_added:\n",
        "        if False:\n",
        LAUNCHES,
    ),
    Fault(
        "a value that a bias hides is multiplied in the backward",
        BACKWARD,
        "    clear_unseen(v, 0, unseen)\n",
        "",
        LAUNCHES,
    ),
    Fault(
        "dv without dropout's scale",
        BACKWARD,
        "tensors.dv, dv, options.keep_scale",
        "tensors.dv, dv, 1.0",
        GRADIENTS_DROPOUT,
    ),
    Fault(
        "dropped probabilities have gradients",
        TILE_BACK,
        "        nisa.tensor_copy_predicated(dst=kept, src=0.0, predicate=dropped)\n",
        "",
        GRADIENTS_DROPOUT,
    ),
    Fault(
        "delta without the gradient of softmax_lse",
        TILE_BACK,
        "data2=dlse, op=nl.subtract)",
        "data2=dlse, op=nl.maximum)",
        GRADIENTS,
    ),
    Fault(
        "deltas of the first four tiles' results",
        TILE_BACK,
        "stack.out[:, first:last]",
        "stack.out[:, 0 : last - first]",
        GRADIENTS_LONG,
    ),
    Fault(
        "a softcap's slope of its values, not of their squares",
        TILE_BACK,
        "op=nl.square, data=scores",
        "op=nl.copy, data=scores",
        suite("gradients_agree and training/gemma2"),
    ),
    Fault(
        "every stretch is masked as the first",
        TILE_BACK,
        "range_start=first,",
        "range_start=0,",
        GRADIENTS_LONG,
    ),
    Fault(
        "every stretch of a bias's gradient lies on the first",
        TILE_BACK,
        "RowLayout(0, 0, part * width, width), 1)",
        "RowLayout(0, 0, 0, width), 1)",
        LAUNCHES,
    ),
    Fault(
        "results of rows that a bias leaves empty are multiplied",
        "flash_varlen_backward.py",
        "numbers = numbers.without_empty()",
        "pass",
        suite("gradients_agree and (one_bias or bool_bias)"),
    ),
    Fault(
        "sinks' gradient has the other sign",
        "flash_varlen_backward.py",
        "-p.masked_fill(self.is_empty, 0.0).sum(0)",
        "p.masked_fill(self.is_empty, 0.0).sum(0)",
        suite("gradients_agree and sinks_of_rows"),
    ),
    Fault(
        "keys that nobody sees have rows",
        "backward_plan.py",
        "(column < work.key_stop[:, None])",
        "(column < work.tile_k)",
        GRADIENTS,
    ),
    Fault(
        "a launch has rows twice",
        "rectangles.py",
        "(i - j) % turns",
        "j % turns",
        LAUNCHES,
    ),
    Fault(
        "the diagonal's first tile is skipped",
        "rectangles.py",
        "begin, end = first * group_size // P, depth",
        "begin, end = (first + width) * group_size // P, depth",
        LAUNCHES,
    ),
    Fault(
        "a window's last tile is skipped",
        "rectangles.py",
        "-(-(first + width + left + right) * group_size // P)",
        "-(-(first + left + right) * group_size // P)",
        LAUNCHES,
    ),
    Fault(
        "TensorE turns the first of four tiles for all",
        TILE,
        "src[:, tile, :], identity)",
        "src[:, first, :], identity)",
        LAUNCHES,
    ),
    Fault(
        "heads share runs of more tokens than adjoin",
        "tile_sizes.py",
        "        and fits % (2 * share * run) == 0\n",
        "",
        SHARED,
    ),
    Fault(
        "heads share a gather under a bias",
        "tile_sizes.py",
        " or call.attn_bias is not None",
        "",
        SHARED,
    ),
    Fault(
        "an odd number of heads shares a gather",
        "tile_sizes.py",
        "        and loaded % (2 * share) == 0\n",
        "",
        SHARED,
    ),
    Fault(
        "every stack has long tiles, whatever they add",
        "work_list.py",
        "MORE_COLUMNS = 1 / 8",
        "MORE_COLUMNS = 8",
        SHARED,
    ),
)


def passes(folder, tests):
    """Whether tests pass on the package in a folder. None that runs is an error.

    Of a few chosen by name all cases run, also those that a sample leaves out.
    """
    # -P: or the package of the working directory would be found first
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    given = os.environ.get("PYTHONPATH", "").split(":")
    others = [x for x in given if Path(x) not in (ROOT, Path())]
    path = ":".join([str(folder), str(ROOT / "tools"), *others])
    paths = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    if tests != EVERYTHING:
        paths["HYPOTHESIS_PROFILE"] = "thorough"
    done = subprocess.run(command, cwd=ROOT, env=os.environ | paths, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(tests)}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return done.returncode == 0


def survives(fault):
    """Whether every test passes with a fault."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "torch_paged_attn")
        shutil.copytree(ROOT / "torch_paged_attn", package)
        file = package / "backends/neuron" / fault.file
        text = file.read_text()
        if text.count(fault.old) != 1:
            raise SystemExit(
                f"{fault.name}: {fault.file} has its text {text.count(fault.old)} times"
            )
        file.write_text(text.replace(fault.old, fault.new))
        return passes(folder, fault.tests) and passes(folder, EVERYTHING)


def main(names):
    unknown = set(names) - {fault.name for fault in FAULTS}
    if unknown:
        raise SystemExit(f"no such fault: {', '.join(unknown)}")
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    # each is processes of their own, which the threads wait for
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        suites = list(dict.fromkeys(fault.tests for fault in chosen))
        for tests, passed in zip(suites, pool.map(lambda x: passes(ROOT, x), suites), strict=True):
            if not passed:
                raise SystemExit(f"{' '.join(tests)}: fails without a fault")
        survivors = []
        for fault, alive in zip(chosen, pool.map(survives, chosen), strict=True):
            print(f"{'SURVIVES' if alive else 'caught'}: {fault.name}", flush=True)
            survivors += [fault.name] * alive
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main(sys.argv[1:])
