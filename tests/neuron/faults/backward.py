"""Faults in the backward: its kernel, and how it is cut into launches."""

from faults.fault import LAUNCHES, Fault, suite

TILE_BACK, BACKWARD = "kernels/backward_tile.py", "kernels/attention_backward.py"
GRADIENTS = suite("gradients_agree and more_queries")
GRADIENTS_LONG = suite("gradients_agree and training/long")
GRADIENTS_DROPOUT = suite("gradients_agree and training/dropout")
GRADIENTS_OPTIONS = suite("gradients_agree and gpt_oss")

FAULTS = (
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
        "sum_over_queries(dk, stack.q[:, level], dx, is_further)",
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
        "nisa.tensor_copy_predicated(dst=sums, src=0.0, predicate=predicate)",
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
        "RowLayout(0, 0, part * options.width, width), 1)",
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
        "a tile's last visible keys are skipped",
        "rectangles.py",
        "keys = ((level + 1) * P - 1) // group_size + 1 - first",
        "keys = (level * P - 1) // group_size + 1 - first",
        LAUNCHES,
    ),
    Fault(
        "dq of a tile without its last keys",
        BACKWARD,
        "if seen[place][1] <= chunk * P:",
        "if seen[place][1] <= chunk * P + P:",
        GRADIENTS_LONG,
    ),
    Fault(
        "a stack of one item keeps the last one's dq",
        BACKWARD,
        "        nisa.memset(dst=sums, value=0.0)\n",
        "        pass\n",
        GRADIENTS,
    ),
    Fault(
        "a program without items loads nothing",
        "work_info.py",
        "% (len(items) // programs) == 0",
        "% (len(items) // programs) < 0",
        LAUNCHES,
    ),
)
