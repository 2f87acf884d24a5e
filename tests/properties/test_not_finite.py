"""Infinities and NaN in k and v: which results they reach, in the reference and on the CPU.

docs/semantics.md says it in words. Each case has one such key, KEY, in KV head 1, which query heads
2 and 3 read.
"""

import dataclasses
import math

import pytest
import torch

from torch_paged_attn import flash_varlen, reference
from torch_paged_attn.testing.accuracy import Truth, assert_accurate
from torch_paged_attn.testing.inputs import cumulative

KEY_LEN, KEY, COLUMN, HEADS = 70, 33, 7, slice(2, 4)
INF, NAN = math.inf, math.nan
OPS = {"reference": reference.flash_varlen, "cpu": flash_varlen}

pytestmark = [
    pytest.mark.parametrize("op", OPS.values(), ids=OPS),
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str),
    # the last query stands at the last key
    pytest.mark.parametrize("query_len", [1, 40]),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """One causal sequence. Queries are positive: a key of +inf has a logit of +inf."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def of(cls, dtype, query_len):
        torch.manual_seed(0)
        q = torch.rand(query_len, 4, 32) + 0.1
        return cls(*(x.to(dtype) for x in (q, *torch.randn(2, KEY_LEN, 2, 32))))

    def arguments(self, **options):
        bounds = cumulative([len(self.q)]), cumulative([len(self.k)])
        return (self.q, self.k, self.v, *bounds), {"causal": True} | options

    def run(self, op, **options):
        args, options = self.arguments(**options)
        return op(*args, **options)

    def truth(self, **options):
        args, options = self.arguments(**options)
        return Truth.of(reference.flash_varlen, *args, **options)

    def with_key(self, value):
        k = self.k.clone()
        k[KEY, 1] = value
        return dataclasses.replace(self, k=k)

    def with_value(self, value):
        v = self.v.clone()
        v[KEY, 1, COLUMN] = value
        return dataclasses.replace(self, v=v)

    def sees_key(self):
        """(query_len,): the rows that see KEY."""
        return torch.arange(len(self.q)) + KEY_LEN - len(self.q) >= KEY

    def hides_key(self):
        """A bias that lets all keys be seen but KEY."""
        return (torch.arange(KEY_LEN) != KEY).expand(1, len(self.q), KEY_LEN)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_what_no_query_sees_reaches_nothing(op, dtype, query_len, value):
    case = Case.of(dtype, query_len)
    hidden = [
        {"attn_bias": case.hides_key()},
        {"seqused_k": torch.tensor([KEY], dtype=torch.int32)},
        {"k_start": torch.tensor([KEY + 1]).int(), "seqused_k": torch.tensor([30]).int()},
    ]
    if query_len == 1:
        hidden.append({"window_size_left": KEY_LEN - KEY - 2})
    for options in hidden:
        clean = case.run(op, **options)
        found = case.with_key(value).with_value(value).run(op, **options)
        assert all(map(torch.equal, found, clean)), options


def assert_right_elsewhere(case, op, out, lse, reached_out, reached_lse, **options):
    """What was not reached is as right as it is of finite tensors."""
    clean_out, clean_lse = case.run(op, **options)
    out, lse = out.where(~reached_out, clean_out), lse.where(~reached_lse, clean_lse)
    assert_accurate(out, lse, case.truth(**options))


@pytest.mark.parametrize(("value", "softcap"), [(INF, 0.0), (NAN, 0.0), (NAN, 5.0)])
def test_a_logit_that_is_no_number_makes_its_row_nan(op, dtype, query_len, value, softcap):
    case = Case.of(dtype, query_len)
    out, lse = case.with_key(value).run(op, softcap=softcap)
    reached_out, reached_lse = torch.zeros_like(out, dtype=bool), torch.zeros_like(lse, dtype=bool)
    reached_out[case.sees_key(), HEADS] = True
    reached_lse[HEADS, case.sees_key()] = True
    assert out[reached_out].isnan().all()
    # +inf or NaN
    assert (lse[reached_lse].isnan() | (lse[reached_lse] == INF)).all()
    assert_right_elsewhere(case, op, out, lse, reached_out, reached_lse, softcap=softcap)


def test_a_logit_of_minus_infinity_hides_its_key(op, dtype, query_len):
    case = Case.of(dtype, query_len)
    out, lse = case.with_key(-INF).run(op)
    truth, hidden = case.truth(), case.truth(attn_bias=case.hides_key())
    assert_accurate(out[:, HEADS], lse[HEADS], of_heads(hidden, HEADS))
    assert_accurate(out[:, :2], lse[:2], of_heads(truth, slice(2)))


def of_heads(truth, heads):
    fields = {field.name: getattr(truth, field.name) for field in dataclasses.fields(truth)}
    return Truth(**{n: x[heads] if "lse" in n else x[:, heads] for n, x in fields.items()})


@pytest.mark.parametrize("sign", [1, -1])
def test_softcap_caps_infinite_logits(op, dtype, query_len, sign):
    case, options = Case.of(dtype, query_len), {"softcap": 5.0}
    # tanh of 68 and more is 1, as tanh of infinity is
    large = case.with_key(100.0 * sign).truth(**options)
    assert_accurate(*case.with_key(INF * sign).run(op, **options), large)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_a_value_reaches_its_column_where_it_is_seen(op, dtype, query_len, value):
    case = Case.of(dtype, query_len)
    out, lse = case.with_value(value).run(op)
    reached = torch.zeros_like(out, dtype=bool)
    reached[case.sees_key(), HEADS, COLUMN] = True
    assert out[reached].isnan().all() if math.isnan(value) else (out[reached] == value).all()
    # rows that do not see the key: its weight is 0, and a kernel may multiply 0 by the value
    column = torch.zeros_like(reached)
    column[:, HEADS, COLUMN] = True
    reached |= column & out.isnan()
    assert_right_elsewhere(case, op, out, lse, reached, torch.zeros_like(lse, dtype=bool))
