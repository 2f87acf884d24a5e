"""A few problems that have in them what many have."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from torch_paged_attn.testing import Problem

# arguments of a running kernel: whether there is one makes another kernel, its value does not
AT_RUN_TIME = ("window_size_left", "window_size_right", "softcap", "padding_rows", "density")


def every_other(cases: Iterable[Any]) -> list[Any]:
    """With `--sample`, the first of the cases, the third and so on."""
    return every(2, cases)


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """With `--sample`, the first of the cases and each that is so many behind the one before."""
    return [x if i % step == 0 else left_out(x) for i, x in enumerate(cases)]


def every_row(step: int, rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The same of cases of several arguments."""
    return [x if i % step == 0 else left_out(*x) for i, x in enumerate(rows)]


def some(cases: Iterable[Any], *sampled: Any) -> list[Any]:
    """With `--sample`, these of the cases."""
    return [x if x in sampled else left_out(x) for x in cases]


def left_out(*case: Any) -> Any:
    """A case, by its arguments, that `--sample` leaves to the device's suite."""
    return pytest.param(*case, marks=pytest.mark.device_suite)


def values_of(problem: Problem) -> Iterator[tuple[str, str]]:
    """What a problem asks for: each field, a layout's one by one, with its value."""
    for field in dataclasses.fields(problem):
        value = getattr(problem, field.name)
        if dataclasses.is_dataclass(value):
            for part in dataclasses.fields(value):
                yield from _value(value, part, f"{field.name}.{part.name}")
        elif field.name not in ("name", "num_heads", "num_kv_heads"):
            yield from _value(problem, field, field.name)
    yield "group", repr(problem.num_heads // problem.num_kv_heads)


def _value(owner: Any, field: dataclasses.Field[Any], name: str) -> Iterator[tuple[str, str]]:
    value = getattr(owner, field.name)
    yield name, repr(value != field.default if field.name in AT_RUN_TIME else value)


def covering(problems: Iterable[Problem]) -> list[Problem]:
    """Few of the problems, in their order: every value of every field that is in one of them all is
    in one of these. The one with the most that is new comes next.
    """
    left = {x.name: (x, set(values_of(x))) for x in problems}
    order = list(left)
    chosen: dict[str, Problem] = {}
    while any(new for _, new in left.values()):
        name = max(left, key=lambda n: len(left[n][1]))
        chosen[name], new = left.pop(name)
        for _, others in left.values():
            others -= new
    return [chosen[name] for name in order if name in chosen]
