"""One conformance suite for every backend: a test that takes `runner` runs on each that is chosen.

`pytest tests/backends --backend NAME` chooses (repeat it for several, `neuron` is all its
generations); by default it is all that can run in one process. What did not run, and why, stands
at the end of the output.
"""

import pytest
import torch
from runners import ALONE, RUNNERS
from sampling import (
    ALL,
    ALL_DIFFERENTIABLE,
    IS_THOROUGH,
    NEVER,
    REASONS,
    SAMPLES,
    chosen,
    lacked,
    no_gradients,
    there_are,
)


def names_of(asked):
    """The runners that one `--backend` means: that of this name, or `neuron-2` and so on."""
    return [
        name
        for name in RUNNERS
        if name == asked or (name.rpartition("-")[0] == asked and name not in ALONE)
    ]


def selected(config):
    """The runners that run, by name, and why others do not, but those that were not asked for."""
    asked = config.getoption("--backend")
    names = [name for a in asked for name in names_of(a)] if asked else list(RUNNERS)
    running, absent = {}, {}
    for name in names:
        if not asked and name in ALONE:
            absent[name] = f"{ALONE[name]}: --backend {name}"
        elif (reason := RUNNERS[name].missing()) is not None:
            absent[name] = reason
        else:
            running[name] = RUNNERS[name]
    return running, absent


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "gradients: runs where the runner's backend has those of the case"
    )
    config.addinivalue_line(
        "markers", "over(cases): what a test runs over, by name; it takes `case`"
    )
    config.addinivalue_line(
        "markers", "lacking(cases=ALL): runs over the problems that the runner refuses"
    )
    for asked in config.getoption("--backend"):
        if not names_of(asked):
            raise pytest.UsageError(f"--backend {asked}; there are {', '.join(RUNNERS)}")
    for runner in selected(config)[0].values():
        runner.prepare()


def pytest_ignore_collect(collection_path, config):
    """What only the CPU promises needs no other runner."""
    if collection_path.name == "test_cpu.py" and "cpu" not in selected(config)[0]:
        return True
    return None


def pytest_generate_tests(metafunc):
    if "runner" not in metafunc.fixturenames:
        return
    runners, _ = selected(metafunc.config)
    brief = metafunc.config.getoption("--sample")
    over = metafunc.definition.get_closest_marker("over")
    test = metafunc.function.__name__.removeprefix("test_")
    if "refusal" in metafunc.fixturenames:
        pairs = [(r, x) for r in runners for x in runners[r].refusals]
        parametrize(metafunc, "refusal", runners, [(r, x[0], x) for r, x in pairs])
        return
    if (lacking := metafunc.definition.get_closest_marker("lacking")) is not None:
        cases = lacking.args[0] if lacking.args else ALL
        pairs = [(r, p) for r in runners for p in cases.values() if lacked(runners[r], p)]
        parametrize(metafunc, "case", runners, [(r, p.name, p) for r, p in pairs])
        return
    if over is None:
        names = [name for name in runners if chosen(name, test, (test,), is_brief=brief)]
        metafunc.parametrize("runner", [runners[n] for n in names], ids=names, indirect=True)
        return
    cases = over.args[0]
    pairs = [(r, c) for r in runners for c in chosen(r, test, tuple(cases), is_brief=brief)]
    pairs = [(r, c) for r, c in pairs if not lacked(runners[r], cases[c])]
    if metafunc.definition.get_closest_marker("gradients") is not None:
        pairs = [(r, c) for r, c in pairs if no_gradients(runners[r], cases[c]) is None]
    parametrize(metafunc, "case", runners, [(r, c, cases[c]) for r, c in pairs])


def parametrize(metafunc, argument, runners, rows):
    """Over (the runner's name, the value's name, the value of `argument`)."""
    metafunc.parametrize(
        ("runner", argument),
        [(runners[r], value) for r, _, value in rows],
        ids=[f"{r}-{name}" for r, name, _ in rows],
        indirect=["runner"],
    )


def pytest_collection_modifyitems(config, items):
    """A test that no runner runs is none."""
    none = [i for i in items if getattr(i, "callspec", None) and "NOTSET" in i.callspec.id]
    config.hook.pytest_deselected(items=none)
    items[:] = [item for item in items if item not in none]


@pytest.fixture
def runner(request):
    with request.param.session():
        yield request.param


@pytest.fixture(autouse=True)
def poison_allocations():
    """`torch.empty` hands out NaN: a kernel that leaves an element unwritten is found."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


def pytest_terminal_summary(terminalreporter, config):
    running, absent = selected(config)
    terminalreporter.section("tests/backends: what did not run, and why")
    refused = {}
    for name, runner in running.items():
        for problem in ALL_DIFFERENTIABLE.values():
            if (reason := no_gradients(runner, problem)) is not None:
                refused.setdefault((name, reason), []).append(problem.name)
    if not absent and not refused and (IS_THOROUGH or running.keys().isdisjoint(SAMPLES)):
        terminalreporter.write_line("everything ran")
    for name, runner in running.items():
        absent_problems = [p.name for p in ALL.values() if lacked(runner, p)]
        if absent_problems:
            why = f"{name}: refused, because it lacks {', '.join(runner.lacks())}"
            terminalreporter.write_line(f"{why}: {'; '.join(absent_problems)}")
    for name, reason in absent.items():
        terminalreporter.write_line(f"{name}: nothing, because {reason}")
    for (name, reason), problems in refused.items():
        which = "all" if len(problems) == len(ALL_DIFFERENTIABLE) else "; ".join(problems)
        terminalreporter.write_line(f"{name}: gradients refused, because {reason}: {which}")
    for name in running:
        for test, reason in NEVER.get(name, {}).items():
            terminalreporter.write_line(f"{name}: never {test}: {reason}")
        if IS_THOROUGH or name not in SAMPLES:
            continue
        sample = SAMPLES[name]
        rest = "HYPOTHESIS_PROFILE=thorough runs what it leaves out"
        if config.getoption("--sample") and sample.brief:
            rest = f"{rest}, the suite of the device much of it"
        terminalreporter.write_line(f"{name}: {sample.reason}; {rest}:")
        for test, cases in sample.at(config.getoption("--sample")).items():
            if (table := REASONS.get(test)) is not None:
                reasons = getattr(sample, table)
                left_out = [p for p in there_are(running[name], test) if p not in cases]
                like = [f"{p} ({reasons[p]})" if p in reasons else p for p in left_out]
                terminalreporter.write_line(f"  {test}: left out {'; '.join(like)}")
            else:
                ran = f"only {', '.join(cases)} ran" if cases else "nothing ran"
                terminalreporter.write_line(f"  {test}: {ran}")
