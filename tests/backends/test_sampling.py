"""The table of what runs names what there is; and every problem runs on every runner, or its
absence has a reason that leads to one that runs.
"""

from pathlib import Path

import pytest
from likenesses import JudgedBy, Like
from runners import RUNNERS
from sampling import ALL, ALL_DIFFERENTIABLE, REASONS, SAMPLES, there_are

from torch_paged_attn.testing import SELECTED, SELECTED_DIFFERENTIABLE

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("name", SAMPLES)
def test_table(name):
    assert name in RUNNERS
    sample, known = SAMPLES[name], ALL_DIFFERENTIABLE | ALL | SELECTED | SELECTED_DIFFERENTIABLE
    for test, cases in [*sample.cases.items(), *sample.brief.items()]:
        if not test.startswith(("write", "quantize", "merge")):  # whose cases are no problems
            assert set(cases) <= set(known), test
    for test, cases in sample.brief.items():
        assert set(cases) <= set(sample.cases.get(test, cases)), f"more of {test} with --sample"


# the folder of a device's own tests -> what runs all of them, where its files change and each night
SUITES = {
    "tpu": "test-tpu-interpreted",
    "neuron": "test-neuron",
    "triton": "test-triton-interpreted",
}


def test_what_a_sample_leaves_out_is_run_by_the_suite_of_its_device():
    for page in (REPOSITORY / "tests").rglob("test_*.py"):
        if "mark.device_suite" in page.read_text() and page != Path(__file__):
            assert page.parent.name in SUITES, f"no suite of a device runs {page}"
    makefile = (REPOSITORY / "Makefile").read_text()
    workflow = (REPOSITORY / ".github/workflows/ci.yml").read_text()
    for folder, target in SUITES.items():
        recipe = makefile.partition(f"\n{target}: install\n")[2].partition("\n\n")[0]
        assert f"tests/{folder} tests/backends" in recipe and "--sample" not in recipe
        assert f"make {target}" in workflow


def test_what_is_left_to_thorough_is_run_by_it():
    lines = (REPOSITORY / "Makefile").read_text().splitlines()
    folders = {word for x in lines if x.startswith("\t$(THOROUGH) ") for word in x.split()}
    for page in (REPOSITORY / "tests").rglob("test_*.py"):
        if "mark.thorough" in page.read_text() and page != Path(__file__):
            over = {x.relative_to(REPOSITORY).as_posix() for x in (page, *page.parents[:2])}
            assert over & folders, f"no part of `make thorough` runs {page}"
    [parts] = (x.split()[1:] for x in lines if x.startswith("thorough: "))
    nightly = ", ".join(part.removeprefix("thorough-") for part in parts)
    assert f"part: [{nightly}]" in (REPOSITORY / ".github/workflows/ci.yml").read_text()


def is_judged(problem, by, cases):
    """Whether a test outside the sample is there and names the problem, or one inside takes it."""
    file, _, function = by.test.partition("::")
    text = (REPOSITORY / file).read_text()
    if not function.startswith("test_") or f"def {function}(" not in text:
        return False
    if file.startswith("tests/backends/"):
        return problem in cases.get(function.removeprefix("test_"), (problem,))
    return problem in text


def why_absent(problem, reasons, running, cases, seen=()):
    """What is wrong with the reason why a problem does not run; None if there is nothing wrong."""
    if problem in running:
        return None
    if problem in seen:
        return f"{' is like '.join(seen)}, which is like {problem} again"
    reason = reasons.get(problem)
    if reason is None:
        return f"{problem} has no reason"
    if isinstance(reason, JudgedBy):
        return None if is_judged(problem, reason, cases) else f"{reason.test} has no {problem}"
    return why_absent(reason.problem, reasons, running, cases, (*seen, problem))


@pytest.mark.parametrize("test", REASONS)
@pytest.mark.parametrize("name", RUNNERS)
def test_every_problem_runs_or_is_like_one_that_runs(name, test):
    sample = SAMPLES.get(name)
    if sample is None or test not in sample.cases:
        return  # all of them run
    runner, cases = RUNNERS[name], sample.cases
    if sample.rest_on:
        # the same refusals, and what is left out has its reasons there
        assert there_are(runner, test) == there_are(RUNNERS[sample.rest_on], test)
        assert not SAMPLES[sample.rest_on].rest_on
        return
    reasons = getattr(sample, REASONS[test])
    wrong = [why_absent(p, reasons, cases[test], cases) for p in there_are(runner, test)]
    assert not [x for x in wrong if x is not None]


@pytest.mark.parametrize("name", [n for n, r in RUNNERS.items() if r.backend() and r.lacks()])
def test_each_argument_that_is_refused_is_in_a_problem(name):
    used = {argument for p in (ALL | SELECTED).values() for argument in p.optional}
    assert set(RUNNERS[name].lacks()) <= used


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        ({}, "a has no reason"),
        ({"a": ("b", "")}, "b has no reason"),
        ({"a": ("b", ""), "b": ("a", "")}, "a is like b, which is like a again"),
        ({"a": "tests/tpu/test_oracle.py::test_nothing"}, "test_nothing has no a"),
        ({"a": "tests/tpu/test_oracle.py::attended"}, "attended has no a"),
    ],
)
def test_reasons_that_lead_nowhere(reasons, said):
    as_reasons = {p: JudgedBy(r) if isinstance(r, str) else Like(*r) for p, r in reasons.items()}
    assert said in why_absent("a", as_reasons, ("c",), {})
