"""Faults in the forward kernel: scores, masks, the running softmax, dropout."""

from faults.fault import LAUNCHES, MIXED, SHARED, Fault, suite

TILE, ATTENTION, PHILOX = "kernels/query_tile.py", "kernels/attention.py", "kernels/philox.py"
LONG = "tests/neuron/test_attention.py", "-k", "test_long_tiles and 3-"
SINKS = suite("agrees and gpt_oss and not gradients")
DROPOUT = suite("test_agrees and dropout")
WINDOW = suite("test_agrees and mistral/window/f32")

FAULTS = (
    Fault(
        "heads that share a gather are swapped",
        TILE,
        "offset=i * part\n",
        "offset=(share - 1 - i) * part\n",
        SHARED,
    ),
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
        ("tests/neuron/test_attention.py", "-k", "forgets"),
    ),
    Fault(
        "the last stack's sums stay",
        ATTENTION,
        (
            "nisa.tensor_copy_predicated(dst=stack.sums, src=0.0, "
            "predicate=spread(begins, 0, cells))"
        ),
        "pass",
        ("tests/neuron/test_attention.py", "-k", "leaves_nan"),
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
        "accumulate=step > 0",
        "accumulate=False",
        suite("test_agrees and deepseek/prefill"),
    ),
    Fault(
        "the first bank of a long tile twice",
        TILE,
        "keys[:, :, first:last], dim)",
        "keys[:, :, 0 : last - first], dim)",
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
        "padding tokens see sinks",
        "tables.py",
        "is_padding | (sinks",
        "(sinks",
        suite("padding_rows"),
    ),
    Fault(
        "TensorE turns the first of four tiles for all",
        TILE,
        "src[:, tile, :], identity)",
        "src[:, first, :], identity)",
        LAUNCHES,
    ),
)
